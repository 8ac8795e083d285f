from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from buffer.errors import ConfigError
from buffer.wire import group_bytes
from buffer.wire.group import RolloutGroup
from buffer.wire.rollout import RolloutState, Status, VersionSpan
from buffer.wire.staleness import last_step_for, stale_threshold, staleness, token_mask

TWO = [VersionSpan(0, 2, 0, "a"), VersionSpan(2, 1, 4, "a")]


def test_weights_of_step_4_serve_steps_5_to_8_at_interval_4() -> None:
    threshold = stale_threshold(max_staleness=0, sync_weights_interval=4)
    assert [step for step in range(4, 12) if 0 <= staleness(step, 4) < threshold] == [5, 6, 7, 8]
    assert last_step_for(4, threshold) == 8
    assert staleness(4, 4) == -1


def test_masks_do_not_apply_without_tokens_and_tools_do_not_age() -> None:
    assert token_mask(None, 0, [], 9, 1) is None
    fresh = token_mask(None, 3, [VersionSpan(0, 1, 0, "a")], 9, 1)
    assert fresh is not None
    assert fresh.tolist() == [0, 1, 1]
    with pytest.raises(ConfigError, match="token threshold is 0"):
        token_mask(None, 3, [], 9, 0)


@given(
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 1)), max_size=12),
    st.integers(0, 9),
    st.integers(1, 5),
)
def test_masks_are_what_the_formula_says_token_by_token(
    tokens: list[tuple[int, int]], step: int, threshold: int
) -> None:
    spans = [VersionSpan(place, 1, version, "a") for place, (version, _) in enumerate(tokens)]
    mask = np.array([kept for _, kept in tokens], "u1")
    fresh = token_mask(mask, len(tokens), spans, step, threshold)
    if not mask.any():
        assert fresh is None
    else:
        assert fresh is not None
        assert fresh.tolist() == [
            kept * (step - version - 1 < threshold) for version, kept in tokens
        ]


@pytest.mark.parametrize("received", [False, True])
def test_group_masks_all_its_rollouts_at_once(received: bool) -> None:
    spans = [TWO, [VersionSpan(0, 2, 5, "a")], []]
    sizes, masks = [3, 2, 0], [None, [0, 0], None]
    states = [
        RolloutState(index=i, response_ids=[1] * n, logprobs=[0.0] * n, spans=s, response_mask=m)
        for i, (n, s, m) in enumerate(zip(sizes, spans, masks, strict=True))
    ]
    group = RolloutGroup("g-0000000000", "g", states)
    group = group_bytes.decode(group_bytes.encode(group)) if received else group
    assert group.fresh_mask(5, 4).tolist() == [0, 0, 1, 0, 0]
    assert group.fresh_mask(5, None).tolist() == group.mask.tolist() == [1, 1, 1, 0, 0]


@given(
    st.lists(
        st.lists(
            st.tuples(st.integers(0, 2), st.integers(0, 2), st.sampled_from("ab")), max_size=3
        ),
        min_size=1,
        max_size=4,
    ),
    st.sampled_from([Status.COMPLETED, Status.EXPIRED]),
    st.booleans(),
)
def test_weights_of_a_group_are_those_of_its_members(
    members: list[list[tuple[int, int, str]]], status: Status, by_token: bool
) -> None:
    group = RolloutGroup("math-0000000001", "math", [_member(n, m) for n, m in enumerate(members)])
    group.states[-1].status = status
    group = RolloutGroup(group.gid, group.task, group.states)
    expected = [("oldest", *pair) for pair in group.oldest_by_lineage().items()]
    expected += [("newest", *pair) for pair in group.newest_by_lineage(by_token).items()]
    if by_token:
        expected += [("last", *pair) for pair in group.last_by_lineage().items()]
    assert group.made_by(by_token) == ",".join(" ".join(map(str, row)) for row in expected)


def _member(index: int, made: list[tuple[int, int, str]]) -> RolloutState:
    lengths = [length for length, _, _ in made]
    spans = [
        VersionSpan(sum(lengths[:n]), length, version, lineage)
        for n, (length, version, lineage) in enumerate(made)
    ]
    tokens = sum(lengths)
    return RolloutState(
        index=index,
        prompt_ids=[1],
        response_ids=list(range(tokens)),
        logprobs=[-0.5] * tokens,
        spans=spans,
        status=Status.COMPLETED,
    )
