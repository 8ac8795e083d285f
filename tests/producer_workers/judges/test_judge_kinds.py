from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from msgspec import structs

from buffer.errors import JudgeError
from buffer.wire.rollout import RolloutState, Status
from producer_workers.agent_loops.single_turn import SingleTurnAgentLoop
from producer_workers.config.task import JudgingSection, TaskSection
from producer_workers.judges import built_in as unsafe
from producer_workers.judges.built_in import program_of
from producer_workers.judges.judge import FunctionJudge, Judge
from producer_workers.judges.load import HttpJudge, load_judge, load_worker_judge, make_judge
from producer_workers.user_code.border import runs_inline
from rolloutmq.extensions.answers.judges import math_verify
from tests.producer_workers.http_service import http_service
from tests.producer_workers.letter_engine import ANSWER, LetterEngine
from tests.producer_workers.user_code.cage import needs_bubblewrap

# -- at a URL ----------------------------------------------------------------


class Service(NamedTuple):
    url: str
    asked: list[Any]


@contextmanager
def service(*answers: tuple[int, bytes]) -> Iterator[Service]:
    """Give each of `answers` (status, body) once, then the last one again and again."""
    asked: list[Any] = []

    def answer(_: str, question: Any) -> tuple[int, bytes]:
        asked.append(question)
        return answers[min(len(asked), len(answers)) - 1]

    with http_service(answer) as url:
        yield Service(f"{url}/score", asked)


def ask(judge: Judge, *states: RolloutState) -> list[dict[str, float]]:
    return asyncio.run(judge.judge_group(states))


def test_a_judge_at_a_url_is_asked_again_until_it_answers() -> None:
    state = RolloutState(
        response="4",
        ground_truth="4",
        data_source="sums",
        extra={"level": 1},
        finish_reason="length",
    )
    with service((503, b""), (429, b""), (200, b'{"score": 0.5, "style": 1}')) as server:
        judge = make_judge(server.url, lambda url: load_judge(url, JudgingSection(retries=2)))
        assert ask(judge, state) == [{"score": 0.5, "style": 1.0}]
    assert len(server.asked) == 3
    assert server.asked[0] == {
        "index": 0, "response": "4", "finish_reason": "length", "ground_truth": "4",
        "data_source": "sums", "messages": [], "tool_calls": [], "reward": None, "role": "",
        "extra": {"level": 1}, "response_ids": [], "response_mask": None,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("answer", "said", "asked"),
    [
        ((500, b""), "status 500", 2),
        ((404, b"no such judge"), "refused with status 404: no such judge", 1),
        ((200, b"<html>"), "not valid JSON", 1),
        ((200, b'{"score": "high"}'), "returned 'score' = 'high'", 1),
    ],
)
def test_a_judge_at_a_url_that_goes_wrong_says_how(answer: Any, said: str, asked: int) -> None:
    with service(answer) as server, pytest.raises(JudgeError, match=said):
        ask(HttpJudge(server.url, JudgingSection(retries=1)), RolloutState())
    assert len(server.asked) == asked


def test_a_judge_at_a_url_that_keeps_silent_or_is_not_there_is_not_waited_for() -> None:
    with (
        service((0, b"")) as server,
        pytest.raises(JudgeError, match=r"no answer within its limit of 0\.1 s"),
    ):
        ask(HttpJudge(server.url, JudgingSection(retries=0, timeout_s=0.1)), RolloutState())
    with pytest.raises(JudgeError, match="Connect"):
        ask(HttpJudge(server.url, JudgingSection(retries=0)), RolloutState())


# -- of whole groups ---------------------------------------------------------


def longest(*, states: list[RolloutState]) -> list[float]:
    """1 for the longest response of a group."""
    lengths = [len(state.response) for state in states]
    return [float(length == max(lengths)) for length in lengths]


class Group:
    """Four rollouts of one group, judged together."""

    def __init__(
        self, tokenizer: Any, judge: Callable[..., Any] = longest, *, partial: bool = True
    ) -> None:
        self.prompt, self.seen = np.arange(10, 15, dtype="<i4"), []  # type: ignore[var-annotated]
        self.engine = LetterEngine(tokenizer, self.prompt)

        def noted(*, states: list[RolloutState]) -> Any:
            self.seen.append([state.response for state in states])
            return judge(states=states)

        self.loop = SingleTurnAgentLoop(
            judge=FunctionJudge("longest", noted), tokenizer=tokenizer, eos_ids=[tokenizer.eos_token_id],
            partial_rollout=partial,
        )  # fmt: skip
        self.states = [RolloutState(index=n, prompt_ids=self.prompt) for n in range(4)]
        for state in self.states[1:]:
            state.sample_params = structs.replace(state.sample_params, max_tokens=3 + state.index)

    def run(self, abort_at: int | None = None) -> list[Status]:
        self.engine.abort_at = abort_at
        asyncio.run(self.loop.generate_group(self.states, self.engine, "math-0000000001"))
        return [state.status for state in self.states]


def test_a_judge_of_groups_sees_all_of_them_once(tokenizer: Any) -> None:
    group = Group(tokenizer)
    assert group.run() == [Status.COMPLETED] * 4
    assert group.seen == [[ANSWER, ANSWER[:4], ANSWER[:5], ANSWER[:6]]]
    assert [state.reward for state in group.states] == [{"score": 1.0}, *[{"score": 0.0}] * 3]


def test_who_has_ended_waits_for_an_interrupted_sibling_and_is_not_generated_again(
    tokenizer: Any,
) -> None:
    group = Group(tokenizer)
    assert group.run(abort_at=5) == [Status.ABORTED] * 4  # two of them had ended
    assert not group.seen
    assert [state.finish_reason for state in group.states] == ["abort", "length", "length", "abort"]
    before = len(group.engine.requests)
    assert group.run() == [Status.COMPLETED] * 4
    assert len(group.engine.requests) == before + 2
    assert group.seen == [[ANSWER, ANSWER[:4], ANSWER[:5], ANSWER[:6]]]


@pytest.mark.parametrize("result", [[1.0], None, "1234", [1.0, 1.0, 1.0, float("nan")]])
def test_a_judge_of_groups_that_returns_something_else_fails_the_group(
    tokenizer: Any, result: Any
) -> None:
    group = Group(tokenizer, lambda **_: result)
    assert group.run() == [Status.FAILED] * 4
    assert "judge 'longest' returned" in str(group.states[0].error)


# -- put together ------------------------------------------------------------


def test_judges_are_chosen_by_data_source_and_add_up_by_weight() -> None:
    spec = {
        "gsm8k": "gsm8k",
        "code/*": {"exact_match": 0.75, f"{__name__}:longest": 0.5},
        "maths?": {"exact_match": 1.0},
    }
    task = TaskSection.model_validate({"judge": spec, "dataset": {"kind": "jsonl", "path": "none"}})
    assert task.judges == ["gsm8k", "exact_match", f"{__name__}:longest", "exact_match"]
    judge = make_judge(task.judge, load_judge)
    assert judge.sees_group, "one of its judges wants to see the group"
    assert ask(
        judge, RolloutState(response="it is 1,000", ground_truth="#### 1000", data_source="gsm8k")
    ) == [{"score": 1.0, "unparsed": 0.0}]
    code = [
        RolloutState(response=text, ground_truth="ab", data_source="code/py")
        for text in ("ab", "abc")
    ]
    assert ask(judge, *code) == [
        {"exact_match": 1.0, f"{__name__}:longest": 0.0, "score": 0.75},
        {"exact_match": 0.0, f"{__name__}:longest": 1.0, "score": 0.5},
    ]
    both = make_judge({"*": {"gsm8k": 0.5, "exact_match": 0.5}}, load_judge)
    assert ask(both, RolloutState(response="17 or 18", ground_truth="18")) == [
        {"gsm8k": 0.0, "exact_match": 0.0, "score": 0.0, "unparsed": 1.0}
    ]
    with pytest.raises(JudgeError, match="no judge for data source 'poems'"):
        ask(judge, RolloutState(data_source="poems"))
    assert not both.sees_group


@pytest.mark.parametrize(
    ("judge", "said"),
    [
        ("exact", "expected reasoning_gym"),
        ({"a": {"exact": 1.0}}, "not 'exact'"),
        ("math_verify", 'judging = { kind = "process" }'),
        ({"a": "gsm8k", "b": {"python_tests": 1.0}}, "needs a process of its own"),
    ],
)
def test_a_judge_that_cannot_be_is_refused_with_the_config(judge: Any, said: str) -> None:
    given = {"judge": judge, "dataset": {"kind": "jsonl", "path": "none"}}
    with pytest.raises(ValueError, match=said):
        TaskSection.model_validate({**given, "judging": {"kind": "inline"}})


# -- mathematics -------------------------------------------------------------


def test_mathematics_is_never_evaluated_as_python(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from math_verify import parser

    def refused(*_: Any, **__: Any) -> None:
        raise AssertionError("text of a model came to an eval")

    monkeypatch.setattr(parser, "parse_expr", refused)
    attack = f"__import__('pathlib').Path('{tmp_path}/pwned').touch()"
    for text in (
        attack,
        f"answer: {attack}",
        f"${attack}$",
        f"\\boxed{{{attack}}}",
        "12 * (3 + 4)",
    ):
        math_verify(response=text, ground_truth="84")
    assert not list(tmp_path.iterdir())


def test_a_truth_without_mathematics_is_the_data_sets_fault() -> None:
    with pytest.raises(ValueError, match="holds no mathematics"):
        math_verify(response="1", ground_truth=r"\frac{1")


# -- programs ----------------------------------------------------------------


DOUBLE = "def double(x):\n    return 2 * x"
DOCUMENTED = DOUBLE.replace(
    "\n", '\n    """Double.\n\n    ```\n    >>> double(2)\n    ```\n    """\n'
)
INDENTED = "\n".join(f"    {line}" for line in f"```python\n{DOUBLE}\n```".splitlines())


@pytest.mark.parametrize(
    "response",
    [
        f"Here:\n```python\n{DOUBLE}\n```\nDone.",
        f"```python3\n{DOUBLE}\n```",
        f"```Python\n{DOUBLE}\n```",
        f"```py\n{DOUBLE}\n```",
        f"```python3.11\n{DOUBLE}\n```",
        f"``` python title=a.py\n{DOUBLE}\n```",
        f"```\n{DOUBLE}\n```",
        f"~~~python\n{DOUBLE}\n~~~",
        f"````python\n{DOUBLE}\n````",
        f"1. First:\n\n{INDENTED}\n",
        "> ```python\n> def double(x):\n>     return 2 * x\n> ```",
        f"```python\n{DOUBLE}",  # cut off, or never closed
        f"```python\n{DOCUMENTED}\n```",
        f"````markdown\n```python\nx\n```\n````\n\n```python\n{DOUBLE}\n```",
        f"```python\n{DOUBLE}\n```\nIt prints\n```\n4\n```\nand\n```text\n6\n```",
        f"```python\nx = (\n```\nNo:\n```python\n{DOUBLE}\n```",
        f"```bash\npip install x\n```\n```python\r\n{DOUBLE}\r\n```\r\n",
        f"<think>\n```python\ndef double(x):\n    return x\n```\n</think>\n{DOUBLE}",
        DOUBLE,
        f"{DOUBLE}<|im_end|>",
    ],
)
def test_a_program_is_found_in_any_fence(response: str) -> None:
    program = program_of(response)
    assert program is not None
    found: dict[str, Any] = {}
    exec(program, found)
    assert found["double"](4) == 8


@pytest.mark.parametrize(
    "response",
    [
        *("", "I cannot do this.", f"<think>\n```python\n{DOUBLE}\n```", "```text\nx\n```"),
        f"<think>\n```python\n{DOUBLE}\n```\n</think>\nI am done.",
    ],
)
def test_a_response_without_a_program_is_counted(response: str) -> None:
    reward = unsafe.python_tests(response=response, ground_truth="assert double(2) == 4")
    assert reward == {"score": 0.0, "passed_all": 0.0, "unparsed": 1.0}


@pytest.mark.parametrize(
    "unit", ["```\n", "```python\n", "~~~\n", "(", 'x = """\n```\n', "> ```py\n", "-" * 99]
)
def test_many_fences_are_read_in_linear_time(unit: str) -> None:
    """Quadratic time would take minutes for one of these texts."""
    program_of(unit * (200_000 // len(unit)))


@pytest.mark.parametrize("sandbox", ["weak", pytest.param("bubblewrap", marks=needs_bubblewrap)])
def test_programs_are_scored_by_the_tests_they_pass(sandbox: str) -> None:
    python_tests = partial(unsafe.python_tests, sandbox=sandbox)
    good = f"Here:\n```python\n{DOUBLE}\n```\nDone."
    tests = ["assert double(2) == 4", "assert double('a') == 'b'"]
    half = {"score": 0.5, "passed_all": 0.0, "unparsed": 0.0}
    assert python_tests(response=good, ground_truth=tests) == half
    echo = "print(input())\nprint()"
    for truth in (
        [{"input": "x y", "output": "x y\n"}, {"input": "z", "output": "y"}],
        {"input": ["x y", "z"], "output": ["x y", "y"]},  # as APPS has them
        '{"inputs": ["x y", "z"], "outputs": ["x y", "y"]}',
    ):
        assert python_tests(response=echo, ground_truth=truth) == half
    # it ends, with exit code 0, before it is tested
    ends = python_tests(response="import sys\nsys.exit()", ground_truth="assert False")
    assert ends["score"] == 0.0


def test_a_program_may_print_more_than_a_tool_would_keep() -> None:
    lines = "\n".join(str(n) for n in range(20_000))  # 109 kB
    program = "for n in range(20_000):\n    print(n)"
    python_tests = partial(unsafe.python_tests, sandbox="weak")
    expected = [{"input": "", "output": lines}]
    assert python_tests(response=program, ground_truth=expected)["score"] == 1.0
    other = [{"input": "", "output": f"{lines[:-1]}8"}]
    assert python_tests(response=program, ground_truth=other)["score"] == 0.0
    assert python_tests(response=program, ground_truth="assert n == 19_999")["score"] == 1.0


@pytest.mark.parametrize(
    "truth",
    [
        *(4, None, b"assert True", [], "", "18", "no python", [["assert 1"]], {"input": "1"}),
        {"input": ["1", "2"], "output": ["1"]},
        {"input": [[1, 2]], "output": [3]},
        '{"inputs": [[1]], "outputs": [[1]], "fn_name": "f"}',
        '{"inputs": ["1"], "outputs": ["1"]',
    ],
)
def test_a_ground_truth_that_is_no_test_is_the_data_sets_fault(truth: Any) -> None:
    with pytest.raises(ValueError, match=r"the (ground truth|test) .*(test|run|Python|asserts)"):
        unsafe.python_tests(response=DOUBLE, ground_truth=truth)


@runs_inline
def moody(*, response: str, ground_truth: Any, state: RolloutState) -> float:
    state.response_ids[:] = 0
    state.extra["seen"] = response
    if response == "raises":
        raise SystemExit("no")
    if response == "hangs":
        time.sleep(0.4)
    return {"nan": float("nan")}.get(response, 1.0)


@pytest.mark.parametrize("others", [[], ["hangs"]])
def test_a_quick_judge_judges_a_group_in_one_call_and_each_rollout_by_itself(
    others: list[str],
) -> None:
    judging = JudgingSection(timeout_s=0.2)
    judge = load_worker_judge(f"{__name__}:moody", judging)
    assert judge.is_quick
    texts = ["fine", "raises", "nan", "fine", *others]
    states = [
        RolloutState(index=n, response=text, response_ids=[7], logprobs=[0.0])
        for n, text in enumerate(texts)
    ]
    judged = asyncio.run(judge.judge_each(states))
    assert [each if isinstance(each, dict) else type(each) for each in judged] == [
        {"score": 1.0}, JudgeError, JudgeError, {"score": 1.0}, *[JudgeError for _ in others],
    ]  # fmt: skip
    assert [(state.response_ids.tolist(), state.extra) for state in states] == [([7], {})] * len(
        texts
    )
