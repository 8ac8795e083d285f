from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Struct
from msgspec.structs import force_setattr

from buffer.errors import GroupChanged
from buffer.redis.payloads import checksum
from buffer.wire import group_bytes
from buffer.wire.columns import COLUMNS as ROWS
from buffer.wire.document import CORE, Head, Shared, encode_value
from buffer.wire.framing import compress
from buffer.wire.group import RolloutGroup
from buffer.wire.rollout import VersionSpan
from buffer.wire.sampling_mask import SamplingMask
from tests.buffer.wire.test_group_bytes import full
from tests.memory_fault import overwrite
from tests.thoroughness import examples


def whole() -> RolloutGroup:
    """A group with every column of the format."""
    first, second = full().states
    for state in (first, second):
        state.messages = [{"role": "user", "content": "1 + 1"}]
        state.ground_truth = {"answers": [2]}
        state.extra = {"level": [1]}
    second.extra = {"level": [2]}
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
    with pytest.raises(GroupChanged, match=rf"{group.gid}: its bytes changed"):
        group.check_unchanged()


def test_all_columns_of_the_format_are_tried() -> None:
    assert {name.partition("/")[0] for name in COLUMNS} == {*CORE, *ROWS}


Path = tuple[Any, ...]


def leaves(value: Any, path: Path = ()) -> Iterator[Path]:
    """The paths to all values of a head that contain no others."""
    if isinstance(value, Struct):
        parts = [(name, getattr(value, name)) for name in value.__struct_fields__]
    else:
        parts = [*(value.items() if isinstance(value, dict) else enumerate(value))]
    for key, part in parts:
        if isinstance(part, Struct | dict | list | tuple) and len(_items(part)):
            yield from leaves(part, (*path, key))
        elif key not in ("schema", "pad", "data"):  # of the document, and no part of the group
            yield (*path, key)


def _items(value: Any) -> Any:
    return value.__struct_fields__ if isinstance(value, Struct) else value


def put(value: Any, path: Path, new: Any) -> Any:
    """Put a value at a path; return what is to stand in place of `value`."""
    if not path:
        return new
    key, *rest = path
    inner = put(getattr(value, key) if isinstance(value, Struct) else value[key], (*rest,), new)
    if isinstance(value, tuple):
        return (*value[:key], inner, *value[key + 1 :])
    if isinstance(value, Struct):
        force_setattr(value, key, inner)
    else:
        value[key] = inner
    return value


LEAVES = sorted(leaves(received().head), key=str)


@pytest.mark.parametrize("path", LEAVES, ids=lambda path: ".".join(map(str, path)))
@pytest.mark.parametrize("new", ["another", None, object()], ids=["text", "none", "object"])
def test_a_changed_text_name_or_number_of_the_head_is_found(path: Path, new: Any) -> None:
    group = received()
    made = group.continued(group.states)
    made.check_unchanged()
    before = encode_value(group.head)
    put(group.head, path, new)
    if new is None and encode_value(group.head) == before:
        return  # it was none before
    for changed in (group, made):
        with pytest.raises(GroupChanged, match=rf": .*{path[0]}.* changed"):
            changed.check_unchanged()


def test_all_parts_of_the_head_are_tried() -> None:
    tried = {path[0] for path in LEAVES}
    assert tried == set(Head.__struct_fields__)
    deeper = {path[1] for path in LEAVES if path[0] == "shared"}
    assert deeper == set(Shared.__struct_fields__)


@pytest.mark.parametrize("name", COLUMNS)
def test_another_column_in_place_of_a_received_one_is_found(name: str) -> None:
    for change in ("equal", "gone"):
        group = received()
        if change == "equal":
            group.columns[name] = group.columns[name].copy()
        else:
            del group.columns[name]
        with pytest.raises(GroupChanged, match=rf": {name} changed"):
            group.check_unchanged()


@pytest.mark.parametrize("change", ["column", "columns", "head"])
def test_other_parts_than_the_received_ones_are_found(change: str) -> None:
    group = received()
    if change == "column":
        group.columns["more"] = np.zeros(2, "<f4")
    elif change == "columns":
        group.columns = dict(group.columns)
    else:
        group.head = copy.copy(group.head)
    group.seal = None  # type: ignore[attr-defined]
    with pytest.raises(GroupChanged):
        group.check_unchanged()


@pytest.mark.parametrize("kind", DATA)
def test_a_mask_may_be_assigned_and_is_sealed_then(kind: str) -> None:
    group = received(kind)
    for _ in range(2):
        group.mask = 1 - group.mask
        group.check_unchanged()
    with pytest.raises(ValueError, match="read-only"):
        group.columns["mask"][0] = 1
    overwrite(group.columns["mask"])
    with pytest.raises(GroupChanged, match=r": mask changed"):
        group.check_unchanged()


def test_the_mask_of_a_group_without_one_is_its_own() -> None:
    first = full().states[0]
    group = group_bytes.decode(group_bytes.encode(RolloutGroup("sums-0000000008", "sums", [first])))
    assert "mask" not in group.columns
    assert group.mask.tolist() == [1, 1]
    group.check_unchanged()
    overwrite(group.mask)
    with pytest.raises(GroupChanged):
        group.check_unchanged()


def test_no_check_in_another_thread_meets_half_of_an_assignment() -> None:
    group = received()
    ends = threading.Event()

    def assign() -> None:
        while not ends.is_set():
            group.mask = 1 - group.mask

    thread = threading.Thread(target=assign)
    thread.start()
    try:
        for _ in range(examples(3000)):
            group.check_unchanged()
    finally:
        ends.set()
        thread.join()


@pytest.mark.parametrize("kind", DATA)
def test_received_columns_are_read_only(kind: str) -> None:
    for column in received(kind).columns.values():
        with pytest.raises(ValueError, match="read-only"):
            column[...] = 0
