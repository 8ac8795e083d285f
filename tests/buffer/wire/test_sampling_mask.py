from __future__ import annotations

from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from buffer.errors import WireError
from buffer.wire import group_bytes
from buffer.wire.group import RolloutGroup
from buffer.wire.rollout import RolloutState, Status
from buffer.wire.sampling_mask import SamplingMask, joined_masks

Sets = list[list[int]]


def mask_of(sets: Sets) -> SamplingMask:
    ids = [token for own in sets for token in own]
    return SamplingMask(np.array([len(own) for own in sets], "<i4"), np.array(ids, "<i4"))


def sets_of(mask: Any, tokens: int) -> Sets:
    if mask is None:
        return [[]] * tokens
    return [own.tolist() for own in np.split(mask.ids, np.cumsum(mask.counts)[:-1])]


@st.composite
def responses(draw: st.DrawFn) -> tuple[list[int], Sets]:
    """Tokens, and of some the set that they were sampled from."""
    tokens = draw(st.lists(st.integers(0, 50), max_size=6))
    others = [draw(st.none() | st.lists(st.integers(0, 50), max_size=4)) for _ in tokens]
    pairs = zip(tokens, others, strict=True)
    return tokens, [[] if rest is None else sorted({own, *rest}) for own, rest in pairs]


def state(tokens: list[int], mask: Any, **more: Any) -> RolloutState:
    return RolloutState(
        prompt_ids=[1, 2],
        response_ids=tokens,
        logprobs=[-1.0] * len(tokens),
        sampling_mask=mask,
        status=Status.COMPLETED,
        **more,
    )


@given(st.lists(responses() | st.just("address"), min_size=1, max_size=4))
def test_masks_are_the_same_after_the_wire(made: list[Any]) -> None:
    states = [
        state([3], "math-0000000001/s.npy#0", index=n)
        if own == "address"
        else state(own[0], mask_of(own[1]), index=n)
        for n, own in enumerate(made)
    ]
    data = group_bytes.encode_checked(RolloutGroup("math-0000000001", "math", states))
    found = group_bytes.decode(data)
    for own, mask, again in zip(made, found.values_of("sampling_mask"), found.states, strict=True):
        if own == "address":
            assert mask == again.sampling_mask == "math-0000000001/s.npy#0"
            continue
        assert sets_of(mask, len(own[0])) == sets_of(again.sampling_mask, len(own[0])) == own[1]


@given(st.lists(responses(), min_size=1, max_size=4), st.integers(0, 3))
def test_masks_grow_turn_by_turn_and_move_with_the_prompt(made: list[Any], moved: int) -> None:
    """What is read in between (a tool's answer) has no set; a file stays right for the last tokens."""
    grown = state([], None)
    wanted: Sets = []
    for tokens, sets in made:
        logprobs = np.zeros(len(tokens), "<f4")
        grown.append(np.array(tokens, "<i4"), logprobs, (), sampling_mask=mask_of(sets))
        grown.read(np.array([9], "<i4"))
        wanted += [*sets, []]
    mask = grown.sampling_mask
    assert sets_of(mask, len(wanted)) == wanted
    if not isinstance(mask, SamplingMask):
        return
    for start in range(len(wanted)):
        assert sets_of(mask.part(slice(start, None)), 0) == wanted[start:]
    more: Sets = [[]] * moved + wanted
    assert sets_of(SamplingMask.unpacked(mask.packed(), len(more)), 0) == more
    shifted = joined_masks([(None, moved), (mask, len(wanted))])
    assert isinstance(shifted, SamplingMask)
    less = SamplingMask.unpacked(shifted.packed(), len(wanted))
    assert sets_of(less, 0) == wanted
    first = next(n for n, own in enumerate(wanted) if own)
    with pytest.raises(ValueError, match="counts"):
        SamplingMask.unpacked(mask.packed(), len(wanted) - first - 1)


def test_a_rollout_whose_mask_is_in_a_file_cannot_grow() -> None:
    made = state([3], "math-0000000001/s.npy#0")
    with pytest.raises(WireError, match="cannot grow"):
        made.read(np.array([4], "<i4"))


@pytest.mark.parametrize(
    ("counts", "ids", "said"),
    [
        ([2, 1], [5, 6, 8], "token 1, id 7, is not among the 1 tokens"),
        ([2, 0, 0], [5, 6], "shape"),
        ([3, -1], [5, 6], "negative count"),
        ([2, 2], [5, 6, 7], "3 ids, and its counts add up to 4"),
        ([2**31 - 1, 2**31 - 1], [5, 6], "add up to"),
        ([2, 1], [5, -6, 7], "negative value"),
        ([2, 1], [5.0, 6.0, 7.0], "sampling_mask/ids"),
    ],
)
def test_hostile_masks_are_refused(counts: list[int], ids: list[Any], said: str) -> None:
    good = state([5, 7], mask_of([[5, 6], [7]]))
    raw = msgpack.unpackb(group_bytes.encode(RolloutGroup("math-0000000001", "math", [good])))
    for name, values in (("sampling_mask/counts", counts), ("sampling_mask/ids", ids)):
        column = np.array(values)
        column = column.astype("<f8" if column.dtype.kind == "f" else "<i4")
        raw["columns"][name] = [len(raw["data"]), len(column)]
        raw["data"] += column.tobytes() + bytes(-column.nbytes % 8)
    with pytest.raises(WireError, match=said):
        group_bytes.decode(msgpack.packb(raw))


@pytest.mark.parametrize("column", [[], [5, 1], [-1, 1, 2]])
def test_files_that_are_no_masks_are_refused(column: list[int]) -> None:
    with pytest.raises(ValueError, match="not a sampling mask"):
        SamplingMask.unpacked(np.array(column, "<i4"), 2)
