"""Every change of a received column is found, in whatever byte."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from buffer.errors import GroupChanged
from buffer.redis.payloads import checksum
from buffer.wire import group_bytes
from buffer.wire.document import LAYOUT
from buffer.wire.framing import compress
from buffer.wire.group import RolloutGroup
from buffer.wire.rollout import Status, VersionSpan
from buffer.wire.sampling_mask import SamplingMask
from tests.buffer.wire.test_group_bytes import full
from tests.memory_fault import overwrite


def whole() -> RolloutGroup:
    """A group with every column of the format."""
    first, second = full().states
    first.spans = [VersionSpan(0, 2, 3, "l0")]
    first.finish_reason = "stop"
    first.response_mask = np.array([1, 0], "u1")
    first.sampling_mask = SamplingMask(np.array([2, 0], "<i4"), np.array([5, 9], "<i4"))
    return RolloutGroup("sums-0000000008", "sums", [first, second])


PLAIN = group_bytes.encode(whole())
DATA = {"plain": PLAIN, "compared": PLAIN, "zstd": compress(PLAIN, "zstd")}


def received(kind: str = "plain") -> RolloutGroup:
    # a copy: the bytes of a constant may be shared
    data = memoryview(bytearray(DATA[kind])).toreadonly()
    return group_bytes.decode_each([data], ["" if kind == "plain" else checksum(data)])[0]


COLUMNS = sorted(received().columns)


@given(st.sampled_from(sorted(DATA)), st.sampled_from(COLUMNS), st.floats(0, 1), st.booleans())
def test_a_changed_byte_of_any_column_is_found(
    kind: str, name: str, place: float, is_continued: bool
) -> None:
    group = received(kind)
    column = group.columns[name]
    if is_continued:
        group = group.continued(group.states)
    group.check_unchanged()
    overwrite(column, int(place * (column.nbytes - 1)))
    with pytest.raises(GroupChanged, match=rf"{group.gid}: its columns changed"):
        group.check_unchanged()


def test_all_columns_of_the_format_are_tried() -> None:
    assert sorted(LAYOUT) == COLUMNS


def test_a_group_may_get_another_mask_and_status_and_no_other_column() -> None:
    group = received()
    group.mask = group.mask.copy()
    group.set_status(Status.ABORTED)
    group.check_unchanged()
    group.columns["rewards"] = group.columns["rewards"] + 1
    with pytest.raises(GroupChanged, match="rewards changed"):
        group.check_unchanged()


@pytest.mark.parametrize("kind", DATA)
def test_received_columns_are_read_only(kind: str) -> None:
    for column in received(kind).columns.values():
        with pytest.raises(ValueError, match="read-only"):
            column[...] = 0
