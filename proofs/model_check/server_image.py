"""The key space of an in-memory server as a value that can be kept, compared and put back."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from time import sleep
from typing import Any

import fakeredis._helpers
import fakeredis._socket._base
import fakeredis.commands_mixins.server_mixin
import fakeredis.model._stream
from fakeredis._core import Item
from fakeredis.model import ExpiringMembersSet, Hash, XStream, ZSet

Entry = tuple[str, Any, float | None]
"""The type of a key, its value (never changed), and when it expires in seconds."""

START_S = 1_700_000_000.0


class Image(dict[bytes, Entry]):
    """Every key with its entry. Equal entries are one object, so `numbers` tells images apart."""

    numbers: tuple[int, ...] = ()


class Clock:
    """The clock of the server: it stands still until a history moves it."""

    sleep = staticmethod(sleep)

    def __init__(self) -> None:
        self.now_s = START_S

    def time(self) -> float:
        return self.now_s


@contextmanager
def frozen(clock: Clock) -> Iterator[None]:
    modules: list[Any] = [
        fakeredis._helpers,
        fakeredis._socket._base,
        fakeredis.commands_mixins.server_mixin,
        fakeredis.model._stream,
    ]
    before = [module.time for module in modules]
    for module in modules:
        module.time = clock
    try:
        yield
    finally:
        for module, original in zip(modules, before, strict=True):
            module.time = original


class Images:
    """Takes images of a database. Each entry that ever appeared has a number."""

    def __init__(self, database: Any) -> None:
        self._database = database
        self._known: dict[Any, tuple[int, Entry]] = {}

    def take(self) -> Image:
        image = Image()
        numbers = []
        for key, item in sorted(self._database._dict.items()):
            if key.endswith(b":events") or b":bell:" in key:
                continue  # nothing is decided by them: a lost wake-up costs one poll
            kind, plain, hashable = _plain(item.value)
            name = (key, kind, hashable, item.expireat)
            if name not in self._known:
                self._known[name] = (len(self._known), (kind, plain, item.expireat))
            number, image[key] = self._known[name]
            numbers.append(number)
        image.numbers = tuple(numbers)
        return image

    def put_back(self, image: Image) -> None:
        """Let the server have exactly the keys of an image."""
        self._database._dict.clear()
        self._database._expiry_heap.clear()
        for key, (kind, plain, expires) in image.items():
            item: Any = Item(_value(kind, plain))
            item.expireat = expires
            self._database[key] = item


def _plain(value: Any) -> tuple[str, Any, Any]:
    match value:
        case bytes() | bytearray():
            return "string", bytes(value), bytes(value)
        case Hash():
            return "hash", dict(value._values), frozenset(value._values.items())
        case ZSet():
            return "zset", dict(value._bylex), frozenset(value._bylex.items())
        case ExpiringMembersSet():
            return "set", frozenset(value), frozenset(value)
        case list():
            return "list", tuple(value), tuple(value)
        case XStream():
            stream = Stream(value)
            return "stream", stream, (stream.entries, tuple(value._last_id))
    raise AssertionError(f"a key of type {type(value)}")


class Stream:
    """The entries of a stream, ((ms, number), fields) each."""

    def __init__(self, stream: XStream) -> None:
        self.entries = tuple((tuple(i), tuple(stream._values_dict[i])) for i in stream._ids)
        self._copy = copy.deepcopy(stream)

    def to_value(self) -> XStream:
        return copy.deepcopy(self._copy)


def _value(kind: str, plain: Any) -> Any:
    match kind:
        case "hash":
            filled = Hash()
            filled._values = dict(plain)
            return filled
        case "zset":
            ordered = ZSet()
            for member, score in plain.items():
                ordered[member] = score
            return ordered
        case "set":
            return ExpiringMembersSet(dict.fromkeys(plain))
        case "list":
            return list(plain)
        case "stream":
            return plain.to_value()
    return plain
