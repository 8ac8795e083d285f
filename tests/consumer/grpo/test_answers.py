from __future__ import annotations

from collections import Counter
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from buffer.wire.group import RolloutGroup
from buffer.wire.rollout import RolloutState
from consumer.grpo.reporting.answers import (
    FEWEST_GROUPS,
    FEWEST_LOOPED,
    LONGEST_LOOP,
    answers_of,
    learning_metrics,
    loops,
    reward_parts,
)
from consumer.grpo.reporting.metrics import BatchColumns

Rows = list[tuple[list[int], float | None, bool]]  # tokens, score, whether it was truncated


def group(number: int, rows: Rows, task: str = "math") -> RolloutGroup:
    states = [
        RolloutState(
            index=index,
            prompt_ids=np.array([1], "<i4"),
            response_ids=np.array(ids, "<i4"),
            logprobs=np.zeros(len(ids), "<f4"),
            reward=None if score is None else {"score": score, "form": score / 2},
            finish_reason="length" if is_cut else "stop",
        )
        for index, (ids, score, is_cut) in enumerate(rows)
    ]
    return RolloutGroup(f"{task}-{number:010d}", task, states)


def metrics_of(groups: list[RolloutGroup]) -> dict[str, float]:
    return learning_metrics(
        [each.gid for each in groups], [*map(answers_of, groups)], [*map(reward_parts, groups)]
    )


ROWS = st.lists(
    st.tuples(
        st.lists(st.integers(0, 2), min_size=1, max_size=3),
        st.sampled_from([None, 0.0, 0.5, 1.0]),
        st.booleans(),
    ),
    min_size=1,
    max_size=5,
)


@given(st.lists(ROWS, min_size=1, max_size=6))
def test_metrics_are_those_of_every_rollout_looked_at_by_itself(batch: list[Rows]) -> None:
    found = metrics_of([group(n, rows) for n, rows in enumerate(batch)])
    scored = [[row for row in rows if row[1] is not None] for rows in batch]
    every = [float(score or 0) for rows in scored for _, score, _ in rows]
    ranges = [
        len({score for _, score, _ in own}) == 1
        for own, rows in zip(scored, batch, strict=True)
        if own and len(rows) > 1
    ]
    repeats = differing = 0
    for own in scored:
        for ids in {tuple(ids) for ids, *_ in own}:
            scores = [score for other, score, _ in own if tuple(other) == ids]
            repeats += len(scores) - 1
            differing += sum(score != scores[0] for score in scores)
    texts = Counter(tuple(ids) for rows in batch for ids, *_ in rows)
    number = sum(texts.values())
    cut = [score for rows in batch for _, score, is_cut in rows if is_cut and score is not None]
    expected = {
        "reward_range": max(every) - min(every) if every else None,
        "equal_groups": sum(ranges) / len(ranges) if ranges else None,
        "same_response": max(texts.values()) / number if len(batch) >= FEWEST_GROUPS else None,
        "judge_disagreement": differing / repeats if repeats else None,
        "at_limit": sum(is_cut for rows in batch for *_, is_cut in rows) / number,
        "at_limit_reward": sum(cut) / len(cut) if cut else None,
        "looping": 0.0,
    }
    shown = {name: value for name, value in expected.items() if value is not None}
    whole = {name: value for name, value in found.items() if not name.startswith("reward_part/")}
    assert whole == {f"{name}/math": pytest.approx(value) for name, value in shown.items()}


@given(
    st.lists(st.integers(0, 9), max_size=3),
    st.lists(st.integers(0, 9), min_size=1, max_size=LONGEST_LOOP),
    st.integers(1, 60),
)
def test_a_response_loops_if_it_repeats_a_few_tokens_to_its_end(
    begin: list[int], loop: list[int], times: int
) -> None:
    response = (begin + loop * times)[-256:]
    repeated = len(loop) * (times - 1)
    is_long = len(response) >= max(FEWEST_LOOPED, 3 * len(loop))
    sure = is_long and repeated >= 0.9 * (len(response) - len(loop))
    (found, short) = loops(group(0, [(response, 0.0, False), ([1], 0.0, False)])).tolist()
    assert found or not sure
    assert not short


@given(st.permutations(range(300)), st.integers(1, 300))
def test_a_response_of_different_tokens_does_not_loop(tokens: list[int], length: int) -> None:
    assert not loops(group(0, [(tokens[:length], 0.0, False)])).any()


def test_metrics_are_by_task_and_the_same_on_any_number_of_ranks() -> None:
    random = np.random.default_rng(0)
    groups = [
        group(
            n,
            [([int(t) for t in random.integers(0, 3, 3)], float(random.integers(0, 2)), False)] * 3,
            ("math", "code")[n % 2],
        )
        for n in range(12)
    ]
    alone = BatchColumns.of(groups, np.zeros(36, "<f4")).metrics()
    parts = [
        BatchColumns.of(part, np.zeros(3 * len(part), "<f4")).lists()
        for part in (groups[:5], [], groups[5:])
    ]
    assert BatchColumns.join(parts).metrics() == pytest.approx(alone)
    names = {name.partition("/")[2] for name in alone if name.startswith("equal_groups/")}
    assert names == {"math", "code"}
    assert alone["reward_part/math/form"] == pytest.approx(
        np.mean([each.scores.mean() for each in groups[::2]]) / 2
    )


def test_agents_of_two_roles_may_give_equal_answers_to_other_questions() -> None:
    states = [
        RolloutState(
            index=n, role=role, response_ids=np.array([1], "<i4"), logprobs=np.zeros(1, "<f4"),
            reward={"score": score},
        )
        for n, (role, score) in enumerate([("a", 0.0), ("b", 1.0)])
    ]  # fmt: skip
    pairs = [*combinations(answers_of(RolloutGroup("math-0000000000", "math", states)), 2)]
    assert all(one[0] != other[0] for one, other in pairs)
