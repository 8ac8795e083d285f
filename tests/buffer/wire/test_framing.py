"""zstd payloads: any size comes back, and nothing that a frame says is believed before it is
checked (I11, I12).
"""

from __future__ import annotations

import sys
import tracemalloc
from typing import Any

import orjson
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from buffer.config.memory_budget import MemorySection
from buffer.errors import ConfigError, WireError
from buffer.wire import group_bytes
from buffer.wire.foreign_json import MAX_DEPTH, read_json
from buffer.wire.framing import MAX_BYTES, ZSTD_MAGIC, compress, expand
from buffer.wire.group import RolloutGroup
from buffer.wire.rollout import RolloutState


def group() -> RolloutGroup:
    return RolloutGroup(
        "math-0000000001", "math", [RolloutState(index=0, messages=[], prompt_ids=[1, 2, 3])]
    )


@given(st.binary(max_size=5000))
def test_what_was_compressed_comes_back(data: bytes) -> None:
    frame = compress(data, "zstd")
    assert frame[:4] == ZSTD_MAGIC
    assert expand(frame) == expand(memoryview(frame)) == data


def test_wire_reads_a_document_in_a_frame_of_any_writer() -> None:
    frame = zstandard.ZstdCompressor(level=19, write_checksum=True).compress(
        group_bytes.encode(group())
    )
    assert group_bytes.encode(group_bytes.decode(frame)) == group_bytes.encode(group())


def bomb(size: int) -> bytes:
    """A frame of a few bytes that says it holds `size` bytes, and has blocks for 1 MiB of them."""
    header = ZSTD_MAGIC + bytes([0b1110_0000]) + size.to_bytes(8, "little")
    block = (128 * 1024 << 3 | 1 << 1).to_bytes(3, "little") + b"\0"
    return header + block * 8


@pytest.mark.parametrize("size", [MAX_BYTES + 1, 2**40, 2**63])
def test_inflation_bomb_is_refused_before_memory_is_set_aside(size: int) -> None:
    tracemalloc.start()
    with pytest.raises(WireError, match="at most"):
        group_bytes.decode(bomb(size))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**20


def without_size() -> bytes:
    maker = zstandard.ZstdCompressor(write_content_size=False).compressobj()
    return bytes(maker.compress(group_bytes.encode(group())) + maker.flush())


FRAME = compress(group_bytes.encode(group()), "zstd")


@pytest.mark.parametrize(
    "data",
    [
        without_size(), bomb(2**20 + 1), FRAME[:-1], FRAME[:5], FRAME + b"\0", FRAME + FRAME,
        FRAME[:20] + bytes([FRAME[20] ^ 255]) + FRAME[21:], compress(b"no document", "zstd"),
        compress(FRAME, "zstd"), ZSTD_MAGIC,
    ],
    ids=[
        "no size", "lies", "cut", "header", "trailing", "two", "altered", "not msgpack", "twice",
        "magic",
    ],
)  # fmt: skip
def test_damaged_or_dishonest_frames_are_wire_errors(data: bytes) -> None:
    with pytest.raises(WireError):
        group_bytes.decode(data)


def test_missing_package_is_a_config_error_and_no_bad_payload(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(ConfigError, match="pip install zstandard"):
        group_bytes.decode(FRAME)
    with pytest.raises(ValueError, match="pip install zstandard"):
        MemorySection(compression="zstd")
    assert group_bytes.decode(group_bytes.encode(group())).gid == "math-0000000001"


VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)


@given(VALUES, st.integers(0, 2 * MAX_DEPTH), st.booleans())
def test_a_value_comes_back_unless_it_is_too_deep(value: Any, depth: int, is_map: bool) -> None:
    nested = value
    for _ in range(depth):
        nested = {"a": nested} if is_map else [nested]
    text = orjson.dumps(nested)
    levels = depth + _depth(value)
    if levels <= MAX_DEPTH:
        assert read_json(text, "it") == nested
    else:
        with pytest.raises(WireError, match="it is nested more than"):
            read_json(text, "it")


def _depth(value: Any) -> int:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return isinstance(value, dict | list) + max(map(_depth, items), default=0)


@given(st.binary() | st.sampled_from([b"[", b"{", b'{"a":', b"[[],"]).map(lambda part: part * 9999))
def test_other_bytes_are_refused_in_one_short_line(text: bytes) -> None:
    refused = ""
    try:
        read_json(text, "it")
    except WireError as error:
        refused = str(error)
    assert len(refused) < 600
    assert "\n" not in refused


def test_more_bytes_than_allowed_are_not_parsed() -> None:
    assert read_json(b'"xx"', "it", most=4) == "xx"
    with pytest.raises(WireError, match="it has more than 3 bytes"):
        read_json(b'"xx"', "it", most=3)
