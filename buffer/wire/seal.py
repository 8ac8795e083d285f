"""Notices that a column of a received group is not what the server sent.

Nothing may change received columns: they are read-only, and their memory is never lent again. If
they change all the same, by a fault of this project, of a library or of the machine, no other check
sees it, and a model is trained on wrong tokens. Therefore each group has checksums of its columns,
made where it is decoded. Trainers and workers compare them after the last use of a group, before
anything that was made of it is published, committed or submitted. Making them costs about a tenth
of reading the group, and so does a comparison: far less than a hundredth of a train step.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from isal import isal_zlib
from numpy.typing import NDArray

from buffer.wire.columns import Columns

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
