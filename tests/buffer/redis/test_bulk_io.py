from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from buffer.errors import PayloadMissing, RunDamaged, StoreError
from buffer.redis.bounds import BYTES_PER_VALUE
from buffer.redis.bulk_io import Parts
from buffer.redis.payloads import checksum, chunk_sizes, cut
from buffer.redis.url import Servers
from tests.buffer.scene import Scene
from tests.servers import SAFE, raw_client, start_redis

SIZES = (0, 1, 4095, 4096, 9000, 165_888, 1_048_001, 2_500_000)


def payload(size: int) -> bytes:
    return np.random.default_rng(size).bytes(size)


@pytest.fixture
def key(scene: Scene) -> str:
    return f"{scene.keys.prefix}payload:test"


def names(key: str, count: int) -> list[str]:
    return [f"{key}:{place}" for place in range(count)]


def test_payloads_of_every_size_come_back_whole_and_in_order(scene: Scene) -> None:
    data = [payload(size) for size in SIZES]
    refs = [scene.run.payloads.write(f"math-{i:010d}", "t", part) for i, part in enumerate(data)]
    assert max(ref.chunks for ref in refs) >= 3
    assert [
        bytes(part) for part in scene.run.payloads.read_each(refs, lambda _, parts: parts)
    ] == data


def test_values_are_cut_at_size_classes_where_the_server_has_them_and_read_anywhere(
    scene: Scene,
) -> None:
    servers = scene.store.servers
    allocator = servers.client().info("memory").get("mem_allocator", "hidden")
    is_cut = not allocator.startswith("libc")
    assert servers.has_size_classes == is_cut
    data = payload(165_888)
    refs = [scene.run.payloads.write("math-0000000001", "t", data)]
    assert [ref.chunks for ref in refs] == [1 + is_cut]
    for moved_to in ("libc", "jemalloc-5.3.0"):
        servers._allocator = moved_to
        refs.append(scene.run.payloads.write("math-0000000001", moved_to, data))
    assert [ref.chunks for ref in refs[1:]] == [1, 2]
    parts = scene.run.payloads.read_each(refs, lambda _, found: found)
    assert [bytes(part) for part in parts] == [data] * 3


def test_a_server_that_refuses_info_is_asked_once_for_its_allocator(tmp_path: Path) -> None:
    with start_redis(tmp_path, *SAFE) as url, raw_client(url) as raw:
        raw.execute_command("ACL", "SETUSER", "default", "-info")
        servers = Servers(url, "test")
        assert [servers.has_size_classes for _ in range(3)] == [True] * 3
        servers.close()
        raw.execute_command("ACL", "SETUSER", "default", "+info")
        assert raw.info("commandstats")["cmdstat_info"]["rejected_calls"] == 1


def test_columns_of_received_payloads_are_aligned(scene: Scene) -> None:
    sizes = range(9000, 9009)
    refs = [scene.run.payloads.write(f"math-{n:010d}", "t", payload(n)) for n in sizes]
    parts = scene.run.payloads.read_each(refs, lambda _, found: found)
    assert [np.frombuffer(part, "u1").ctypes.data % 8 for part in parts] == [0] * len(sizes)
    assert [bytes(part) for part in parts] == [payload(size) for size in sizes]


@pytest.mark.parametrize("own_pages", [False, True])
@pytest.mark.parametrize("size", [0, 10, 10**6])
def test_receive_finds_more_or_less_than_was_expected(
    scene: Scene, key: str, size: int, own_pages: bool
) -> None:
    values = [payload(n) for n in (100_000, 3, 70_000)]
    scene.store.send(
        "test", [("SET", name, value) for name, value in zip(names(key, 3), values, strict=True)]
    )
    entries = [(names(key, 2), size), (names(key, 3)[2:], size)]
    found = scene.store.read("test", entries, own_pages=own_pages)
    assert [[bytes(part or b"") for part in parts] for parts in found] == _whole(
        [values[:2], values[2:]], found
    )


def _whole(values: Sequence[Sequence[bytes]], found: Sequence[Parts]) -> list[list[bytes]]:
    # a client without a socket leaves the parts apart
    return [
        [b"".join(parts)] if len(there) == 1 else list(parts)
        for parts, there in zip(values, found, strict=True)
    ]


def test_receive_tells_which_values_are_missing(scene: Scene, key: str) -> None:
    scene.store.send("test", [("SET", names(key, 1)[0], b"here")])
    missing, there = scene.store.read("test", [(names(key, 3), 300), (names(key, 1), 4)])
    assert missing.count(None) == 2
    assert [bytes(part or b"") for part in there] == [b"here"]


def test_the_garbage_collector_rests_while_groups_are_read_and_goes_on_behind(scene: Scene) -> None:
    refs = [scene.run.payloads.write(f"math-{i:010d}", "t", payload(4_500_000)) for i in range(4)]
    assert scene.run.payloads.read_each(refs, lambda *_: [gc.isenabled()]) == [False] * 4
    with pytest.raises(ZeroDivisionError):
        scene.run.payloads.read_each(refs, lambda *_: [1 // 0])
    assert gc.isenabled()
    assert [len(part) for part in scene.run.payloads.read_each(refs, lambda _, parts: parts)] == [
        4_500_000
    ] * 4


def test_missing_chunk_is_named_and_the_next_read_works(scene: Scene) -> None:
    whole = scene.run.payloads.write("math-0000000001", "t", payload(165_888))
    broken = scene.run.payloads.write("math-0000000002", "t", payload(1_500_000))
    scene.raw.unlink(scene.keys.payload_chunks("math-0000000002", "t", 2)[1])
    with pytest.raises(PayloadMissing, match="1 of 2 chunks are gone"):
        scene.run.payloads.read_each([whole, broken, whole], lambda _, parts: parts)
    assert bytes(scene.run.payloads.read(whole)) == payload(165_888)


def test_what_is_no_value_is_told_as_the_library_tells_it(scene: Scene, key: str) -> None:
    scene.raw.rpush(key, "a list")
    with pytest.raises(RunDamaged, match="of another type"):
        scene.store.read("payload read", [([key], 5)])
    assert scene.store.read("payload read", [(names(key, 1), 0)]) == [[None]]


def test_send_raises_the_first_error_and_takes_all_answers(scene: Scene, key: str) -> None:
    with pytest.raises(StoreError, match="value is not an integer"):
        scene.store.send("test", [("SET", key, b"x"), ("INCR", key), ("SET", key, payload(10_000))])
    assert scene.store.send("test", [("STRLEN", key), ("GET", names(key, 1)[0])]) == [10_000, None]


HEADER_BYTES = 10
"""What Redis 7.0 stores around a string of more than 64 KiB (measured)."""


def allocated(size: int) -> int:
    """jemalloc: four size classes per doubling."""
    stored = size + HEADER_BYTES
    step = max(16, 1 << max(0, (stored - 1).bit_length() - 3))
    return -(-stored // step) * step


@given(st.integers(0, 5 * BYTES_PER_VALUE), st.booleans())
def test_chunks_hold_all_bytes_and_none_is_too_large(size: int, by_class: bool) -> None:
    sizes = chunk_sizes(size, by_class)
    assert sum(sizes) == size
    assert sizes == [0] or 0 < min(sizes) <= max(sizes) <= BYTES_PER_VALUE


@given(st.integers(8192, 5 * BYTES_PER_VALUE))
def test_allocator_wastes_little_of_any_size(size: int) -> None:
    assert sum(map(allocated, chunk_sizes(size, by_class=True))) <= size * 1.0625 + 64


@pytest.mark.parametrize("size", [16_384, 65_536, 131_072, 165_888, 262_144, 1_048_000, 1_048_576])
def test_sizes_that_cost_a_quarter_more_in_one_piece_are_cut_once(size: int) -> None:
    assert len(chunk_sizes(size, by_class=True)) <= 2
    assert sum(map(allocated, chunk_sizes(size, by_class=True))) <= size * 1.04


@given(st.integers(1, BYTES_PER_VALUE))
def test_another_allocator_gets_one_value(size: int) -> None:
    assert chunk_sizes(size, by_class=False) == [size]


@given(st.lists(st.binary(max_size=300_000), max_size=6), st.booleans())
def test_chunks_are_views_of_the_pieces_in_order(pieces: list[bytes], by_class: bool) -> None:
    whole = b"".join(pieces)
    chunks = cut(list(pieces), by_class)
    assert [sum(map(len, chunk)) for chunk in chunks] == chunk_sizes(len(whole), by_class)
    assert b"".join(part for chunk in chunks for part in chunk) == whole
    assert all(memoryview(part).obj in pieces for chunk in chunks for part in chunk)
    assert checksum(*pieces) == checksum(whole)
