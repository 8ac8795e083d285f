"""Notices that a column of a received group is not what the server sent.

Nothing may change received columns: they are read-only, and no memory is lent twice. If they change
all the same (a fault of this project, of a library, or of the machine's memory), no check of bytes
and no type would notice, and a model would be trained on wrong tokens. So every group has checksums
of its columns, made where it is decoded. Whoever has used the columns compares them, before
anything that follows from them is stored or published. Both cost less than the checksum of the
received bytes and the decoding beside them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from isal import isal_zlib
from numpy.typing import NDArray

from buffer.rollouts.wire_columns import Columns

_REPLACED = frozenset(("mask", "statuses"))
"""Columns that a group may get anew (`RolloutGroup.mask`, `set_status`)."""


class Seal:
    """The checksums of the columns of one group, made at once; `columns` may be added to later."""

    def __init__(self, columns: Columns) -> None:
        self._columns = columns
        self._decoded = [(name, column, _sum(column)) for name, column in columns.items()]

    def changed(self) -> Iterator[str]:
        """Yield the names of the columns that have changed, or were replaced."""
        for name, column, found in self._decoded:
            is_replaced = self._columns.get(name) is not column and name not in _REPLACED
            if is_replaced or _sum(column) != found:
                yield name


def _sum(column: NDArray[Any]) -> int:
    return isal_zlib.crc32(column)
