"""A fault of memory: a received column changes, though it is read-only."""

from __future__ import annotations

import ctypes
from typing import Any

from numpy.typing import NDArray


def overwrite(column: NDArray[Any], at: int = 0) -> None:
    """Change the byte `at` of a column where it lies."""
    assert not column.flags.writeable
    assert at < column.nbytes
    byte = ctypes.c_uint8.from_address(column.ctypes.data + at)
    byte.value = (byte.value + 1) % 256  # never what it was, after several faults
