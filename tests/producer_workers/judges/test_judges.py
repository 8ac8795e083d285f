from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from buffer.errors import ConfigError, JudgeError
from buffer.wire.rollout import RolloutState
from producer_workers.judges.built_in import UNSAFE_TASKS, exact_match, score_entry, task_datasets
from producer_workers.judges.judge import FunctionJudge, take_columns
from producer_workers.judges.load import load_judge
from rolloutmq.extensions.answers.judges import gsm8k


def judged(function: Callable[..., Any], response: str = "4", truth: Any = "4") -> dict[str, float]:
    state = RolloutState(response=response, ground_truth=truth)
    return asyncio.run(FunctionJudge("mine", function).judge(state))


def returning(value: Any) -> Callable[..., Any]:
    return lambda **_: value


@pytest.mark.parametrize(
    ("value", "reward"),
    [
        (1, {"score": 1.0}),
        (True, {"score": 1.0}),
        (np.float32(0.5), {"score": 0.5}),
        ({"score": 1, "format": 0.25}, {"score": 1.0, "format": 0.25}),
    ],
)
def test_judge_takes_numbers_and_dicts_of_numbers(value: Any, reward: dict[str, float]) -> None:
    result = judged(returning(value))
    assert result == reward
    assert {type(number) for number in result.values()} == {float}


@pytest.mark.parametrize(
    "value",
    [
        None, "1.0", float("nan"), float("inf"), {}, {"reward": 1.0}, {"score": None},
        {"score": 1.0, "length": float("nan")}, {"score": 1.0, 3: 1.0}, np.array([1.0, 2.0]), [1.0],
    ],
)  # fmt: skip
def test_judge_error_names_the_judge_when_it_returns_no_reward(value: Any) -> None:
    with pytest.raises(JudgeError, match="judge 'mine' returned"):
        judged(returning(value))


def test_turn_rewards_of_an_empty_response_are_refused() -> None:
    with pytest.raises(JudgeError, match="judge 'mine' returned 1 turn_rewards for 0 turns"):
        take_columns("mine", [RolloutState()], [{"score": 1.0, "turn_rewards": [1.0]}])


def test_judge_awaits_coroutine_functions_and_what_functions_return() -> None:
    async def slow(**_: Any) -> float:
        await asyncio.sleep(0)
        return 0.5

    assert judged(slow) == judged(lambda **given: slow(**given)) == {"score": 0.5}


@pytest.mark.parametrize(
    ("response", "truth", "score"),
    [("4", 4, 1.0), (" 4\n", "4 ", 1.0), ("44", "4", 0.0), ("", "4", 0.0)],
)
def test_exact_match_compares_texts(response: str, truth: Any, score: float) -> None:
    assert exact_match(response=response, ground_truth=truth) == score


@pytest.mark.parametrize("judge", [exact_match, gsm8k])
def test_judge_raises_when_there_is_no_ground_truth(judge: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="ground"):
        judge(response="4", ground_truth=None)


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("#### 1200", 1.0),
        ("2 + 2 = 4\n#### 1,200", 1.0),
        ("#### $1,200.00 in 3 weeks", 1.0),
        ("it is 1200.", 1.0),
        ("1200 of 1500, so 300", 0.0),
        ("#### 1200 but first #### 7", 0.0),
        ("#### -1200", 0.0),
        ("1900-700=1200", 1.0),
        ("700 and 1200, 5 left", 0.0),
        ("11,200", 0.0),
        ("no idea", 0.0),
        ("####", 0.0),
        ("9" * 5000, 0.0),
        ("", 0.0),
    ],
)
def test_gsm8k_scores_the_final_number(response: str, score: float) -> None:
    reward = gsm8k(response=response, ground_truth="5 * 240 = 1200\n#### 1,200")
    assert reward["score"] == score


def chain_sum_state(response: str) -> RolloutState:
    return RolloutState(
        messages=[{"role": "user", "content": "State the final answer: 5 + 7 ="}],
        response=response,
        ground_truth="12",
        data_source="reasoning_gym/chain_sum",
        extra={"metadata": {}, "config": {"max_terms": 2, "min_terms": 2}},
    )


@pytest.mark.parametrize(
    ("response", "score"),
    [("12", 1.0), (" 12 <|im_end|>", 1.0), ("+12.0", 1.0), ("13", 0.0), ("", 0.0)],
)
def test_reasoning_gym_judge_scores_as_the_package_does(response: str, score: float) -> None:
    reward = asyncio.run(load_judge("reasoning_gym").judge_group([chain_sum_state(response)]))[0]
    assert reward == {"score": score}


@pytest.mark.parametrize(
    ("source", "message"), [(None, "data_source is ''"), ("reasoning_gym/n_queens", "runs eval")]
)
def test_reasoning_gym_judge_refuses_other_sources(source: str | None, message: str) -> None:
    state = chain_sum_state("12").model_copy(update={"data_source": source})
    with pytest.raises(JudgeError, match=message):
        asyncio.run(load_judge("reasoning_gym").judge_group([state]))[0]


def test_reasoning_gym_judge_uses_the_config_of_the_problem() -> None:
    """decimal_arithmetic compares to as many places as its config says."""
    extra = {"metadata": {}, "config": {"max_num_decimal_places": 2}}
    assert score_entry("decimal_arithmetic", "1.001", "q", "1.0", extra) == 1.0
    extra = {"metadata": {}, "config": {"max_num_decimal_places": 5, "precision": 12}}
    assert score_entry("decimal_arithmetic", "1.001", "q", "1.0", extra) < 1.0


PRODUCT = "2 \N{MULTIPLICATION SIGN} 3"


@pytest.mark.parametrize("answer", ["?", "no idea", "2 x", "inf"])
def test_reasoning_gym_judge_scores_0_when_a_verifier_raises_on_the_text(answer: str) -> None:
    entry = {"question": "6?", "answer": PRODUCT, "metadata": {}}
    with pytest.raises(ValueError, match="invalid literal"):
        task_dataset("prime_factorization").score_answer(answer, entry)
    assert score_entry("prime_factorization", answer, "6?", PRODUCT, {}) == 0.0
    assert score_entry("prime_factorization", PRODUCT[::-1], "6?", PRODUCT, {}) == 1.0


def task_dataset(name: str) -> Any:
    dataset_class, config_class = task_datasets()[name]
    return dataset_class(config_class())


def test_reasoning_gym_judge_raises_when_the_problem_itself_is_broken() -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        score_entry("prime_factorization", PRODUCT, "6?", "six", {})


def test_every_task_whose_verifier_evaluates_answers_is_refused() -> None:
    found = set()
    for name, (dataset_class, _) in task_datasets().items():
        source = inspect.getsource(dataset_class.score_answer)
        if any(
            call in source
            for call in ("eval(answer", "parse_expr(answer", "sympify(answer", "exec(")
        ):
            found.add(name)
    assert found == UNSAFE_TASKS


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("exact", "there is no judge 'exact' .*exact_match, gsm8k, math_verify, none, python_tests, reasoning_gym"),
        ("no_such_module:f", "cannot be imported"),
        ("math:no_such_function", "module 'math' has no 'no_such_function'"),
        (":f", "there is no judge"),
    ],
)  # fmt: skip
def test_load_judge_says_what_is_wrong(spec: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_judge(spec)
