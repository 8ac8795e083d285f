"""Cutting payloads: every byte once, in order, and next to nothing wasted by the allocator (I12)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buffer.redis.bounds import BYTES_PER_VALUE
from buffer.redis.payloads import checksum, chunk_sizes, cut

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
