"""The seal of a received group, by which its reader finds that it has changed in memory since."""

from __future__ import annotations

import threading
from operator import attrgetter
from typing import Any

import numpy as np
from isal import isal_zlib
from numpy.typing import NDArray

from buffer.wire.column import read_only
from buffer.wire.document import Columns, Document, Head, encode_value, read
from buffer.wire.framing import Data

_FIELDS = Head.__struct_fields__
_fields = attrgetter(*_FIELDS)

_REPLACING = threading.Lock()
"""A check in another thread sees a column that is being replaced in both tables, or in none."""


class Seal:
    """What was received: the bytes, the head that was read from them, and arrays that view them.

    `crc`: the checksum of `data`, if the caller has computed it.
    """

    def __init__(self, head: Document, columns: Columns, data: Data, crc: int | None) -> None:
        self._head = head
        self._columns = columns
        self._known = columns.copy()
        self._replaced: dict[str, int] = {}  # checksums of columns that `data` does not have
        self._data = data
        self._sum = isal_zlib.crc32(data) if crc is None else crc
        self._head_sum: int | None = None  # from the first check on, so that a take costs no more

    def replace(self, name: str, column: NDArray[Any]) -> None:
        """Put another column into the group, as its owner wants it; it is sealed from now on."""
        own = read_only(np.ascontiguousarray(column))
        crc = isal_zlib.crc32(own)
        with _REPLACING:
            self._known[name] = self._columns[name] = own
            self._replaced[name] = crc

    def changed(self, head: Head, columns: Columns) -> str:
        """Return what has changed in a group that has these parts now; "" for nothing."""
        if isal_zlib.crc32(self._data) != self._sum:
            return "its bytes"
        if head is not self._head or columns is not self._columns:
            return "which parts it has"
        with _REPLACING:
            names = [name for name in self._known if columns.get(name) is not self._known[name]]
            names += [name for name in columns if name not in self._known]
            for name, crc in self._replaced.items():
                if isal_zlib.crc32(self._known[name]) != crc:
                    names.append(name)
        if names:
            return ", ".join(names)
        if self._head_sum is None:
            self._head_sum = isal_zlib.crc32(_packed(_fields(read(self._data))))
        if isal_zlib.crc32(_packed(_fields(head))) == self._head_sum:
            return ""
        pairs = zip(_FIELDS, _fields(head), _fields(read(self._data)), strict=True)
        return ", ".join(name for name, now, then in pairs if _packed(now) != _packed(then))


def _packed(value: Any) -> bytes:
    try:
        return encode_value(value)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        return repr(error).encode()  # nothing of the kind was received
