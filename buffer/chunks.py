"""How a payload is cut into values of Redis, so that the allocator wastes next to nothing.

Redis 7 allocates with jemalloc, in classes of four sizes per doubling: 165,888 bytes in one value occupy 196,608. Cut
once at the largest class that fits, the same bytes occupy 163,840 and 2,560. Two chunks are enough: what is left
behind the cut is less than a fifth of the whole, and at most a fifth of that is wasted again.
"""

from __future__ import annotations

CHUNK_BYTES = 1_048_000
"""At most in one chunk; just below a size class: 1,048,576 would cost 25 % more memory (measured)."""

_HEADER_BYTES = 16
"""More than Redis puts around a string in the same allocation (10)."""

_CUT_FROM_BYTES = 8192
"""Below it a second key costs more than it saves."""

_MOST_WASTE = 1 / 16


def chunk_sizes(size: int) -> list[int]:
    """Bytes of each chunk of a payload of `size` bytes, in order; a reader takes any other cut as well."""
    full, rest = divmod(size, CHUNK_BYTES)
    sizes = [CHUNK_BYTES] * full
    stored = rest + _HEADER_BYTES
    step = 1 << max(0, stored.bit_length() - 3)  # between this size class and the next
    over = stored % step
    if over and rest >= _CUT_FROM_BYTES and step - over > rest * _MOST_WASTE:
        return [*sizes, rest - over, over]
    return [*sizes, rest] if rest or not sizes else sizes


def cut(data: bytes) -> list[memoryview]:
    """The chunks of a payload, not copied; at least one."""
    view, start, parts = memoryview(data), 0, []
    for size in chunk_sizes(len(data)):
        parts.append(view[start : start + size])
        start += size
    return parts
