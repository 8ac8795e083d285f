"""Memory for received payloads, which is used again once nothing refers to it.

Fresh memory costs more than the bytes that are received into it: the kernel maps and clears every
page. A slab is returned when its last view ends: it is a numpy array, every view of its bytes keeps
that array alive, and the interpreter reports the array's end.
"""

from __future__ import annotations

from collections import deque
from weakref import finalize

import numpy as np
from numpy.typing import NDArray

SLAB_BYTES = 5 * 2**20
"""Bytes of one piece of kept memory."""

_KEPT_SLABS = 48
"""Slabs that wait for their next use at most, in one process: 240 MiB."""

_FULL_ENOUGH = SLAB_BYTES // 4
"""Below it, a small value that is kept for long would keep a whole slab."""

# appended to and popped from by all threads, and by the end of a view in any of them
_free: deque[NDArray[np.uint8]] = deque(maxlen=_KEPT_SLABS)


def receive_memory(size: int) -> memoryview:
    """Return at least `size` bytes of memory, which may contain anything."""
    if not _FULL_ENOUGH <= size <= SLAB_BYTES:
        return np.empty(size, np.uint8).data
    try:
        slab = _free.pop()
    except IndexError:
        slab = np.empty(SLAB_BYTES, np.uint8)
    lent = slab[:]
    finalize(lent, _free.append, slab).atexit = False
    return lent.data
