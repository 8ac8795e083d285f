"""Read each message once, though agents send the whole conversation with each request.

The messages of a request are compared with those of the one before it in its session, by all of
their bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import chain, takewhile
from operator import eq
from typing import Any, Generic, TypeVar

import msgspec
from pydantic_core import from_json

from rolloutmq.extensions.gateway.dialects.dialect import AgentRequest, Json

G = TypeVar("G")
T = TypeVar("T")

_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
# A message in the form of every dialect, in place of those that are read apart.
_ANY = msgspec.Raw(b'[{"role":"user","content":""}]')


class Continued(Generic[G, T]):
    """Calls `work` for the items of a list, but for those that were in the list before it.

    `key`: what two items have in common only if `work` returns the same for both, such as the `id`
    of an object that does not change.
    """

    def __init__(self, work: Callable[[G], T], key: Callable[[G], Hashable] = id) -> None:
        self._work = work
        self._key = key
        # keys, items and results; while an item is here, no other object has its id
        self._before: tuple[list[Hashable], Sequence[G], list[T]] = ([], [], [])

    def each(self, items: Sequence[G]) -> list[T]:
        """Return the results of all items."""
        keys = list(map(self._key, items))
        before, _kept, made = self._before
        same = len(before)
        if keys[:same] != before:
            same = sum(takewhile(bool, map(eq, keys, before)))
        moved = dict(zip(before[same:], made[same:], strict=True))
        rest = zip(keys[same:], items[same:], strict=True)
        new = [moved[key] if key in moved else self._work(item) for key, item in rest]
        made = made[:same] + new
        self._before = (keys, items, made)
        return made


Known = dict[Any, Continued[bytes, list[Json]]]
"""The messages of the last request of a session, by the function with which dialects read them."""


def split(kind: type[AgentRequest], body: bytes, known: Known) -> tuple[bytes, list[Json]]:
    """Return a request with one message in place of all, and all of its messages.

    There are none if it is to be read as a whole: for its faults, or since its dialect has none.
    """
    if not kind.history:
        return body, []
    if kind.plain not in known:
        known[kind.plain] = Continued(lambda part: kind.plain(from_json(b"[%b]" % part)), bytes)
    try:
        fields = _FIELDS.decode(body)
        read = known[kind.plain].each(kind.parts(fields[kind.history]))
    except (msgspec.MsgspecError, RecursionError, KeyError, ValueError):
        read = []
    if not read:
        return body, []
    return msgspec.json.encode(fields | {kind.history: _ANY}), [*chain.from_iterable(read)]
