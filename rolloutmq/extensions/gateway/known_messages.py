"""Read each message of a session once, though agents send the whole conversation with each request.

    body ──▶ its messages, by all of their bytes ──▶ known: as they were read before
         │                                       └─▶ new: read by the dialect
         └─▶ all other fields ──▶ read by the dialect

A message that differs in one byte is another one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from itertools import chain
from typing import Generic, TypeVar

import msgspec
from pydantic_core import from_json

from producer_workers.datasets.row_values import byte_count
from rolloutmq.extensions.gateway.dialects.dialect import AgentRequest, Json

G = TypeVar("G")
T = TypeVar("T")

MOST_BYTES = 8 * 2**20  # of what a session has read; the memory is some three times as much
OVERHEAD = 512  # bytes for each message beside its texts

# An escape of JSON: a surrogate pair, half of one (the group), or any other.
_ESCAPE = re.compile(
    r"\\u[dD][89abAB][\da-fA-F]{2}\\u[dD][c-fC-F][\da-fA-F]{2}|(\\u[dD][89a-fA-F][\da-fA-F]{2})|\\."
)

_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
# One message in the form of every dialect, in place of those that are read apart.
_ANY = msgspec.Raw(b'[{"role":"user","content":""}]')


class Once(Generic[G, T]):
    """Calls `work` once for all things with one `key`, and keeps the results.

    `key`: what two things have in common only if `work` returns the same for both, such as the `id`
    of an object that does not change. Above MOST_BYTES, all results are dropped.
    """

    def __init__(self, work: Callable[[G], T], key: Callable[[G], Hashable] = id) -> None:
        self._work = work
        self._key = key
        # With the thing itself: as long as it is kept, no other has its id.
        self._made: dict[Hashable, tuple[G, T]] = {}
        self._bytes = 0

    def each(self, things: Sequence[G]) -> list[T]:
        keys = list(map(self._key, things))
        found = list(map(self._made.get, keys))
        for place, known in enumerate(found):
            if known is None:
                found[place] = self._make(keys[place], things[place])
        return [known[1] for known in found if known]

    def _make(self, key: Hashable, thing: G) -> tuple[G, T]:
        made = (thing, self._work(thing))
        size = OVERHEAD + byte_count(thing, MOST_BYTES)
        if self._bytes + size > MOST_BYTES:
            self._made.clear()
            self._bytes = 0
        if size <= MOST_BYTES:
            self._made[key] = made
            self._bytes += size
        return made


class KnownMessages:
    """The messages in the requests of one session, by dialect.

    A request often begins as the one before: as far as it does, its messages are not even told
    apart.
    """

    def __init__(self) -> None:
        self._read: dict[type[AgentRequest], Once[bytes, list[Json]]] = {}
        # The beginning of the newest history, up to its last part, and the messages in it.
        self._begun: dict[type[AgentRequest], tuple[bytes, list[Json]]] = {}

    def split(self, kind: type[AgentRequest], body: bytes) -> tuple[bytes, list[Json]]:
        """Return a request with one message in place of all, and all of its messages.

        Returns no messages for a request that is to be read as a whole: it has a fault, or its
        dialect has no messages.
        """
        if not kind.history:
            return body, []
        read = self._read.setdefault(kind, Once(partial(_messages_in, kind), bytes))
        begin, messages = self._begun.get(kind, (b"", []))
        try:
            fields = _FIELDS.decode(body)
            rest = history = bytes(fields[kind.history])
            if begin and history.startswith(begin):
                rest = b"[" + history[len(begin) :]
            else:
                messages = []
            parts = kind.parts(rest)
            messages = [*messages, *chain.from_iterable(read.each(parts[:-1]))]
            last = read.each(parts[-1:])
        except (msgspec.MsgspecError, RecursionError, KeyError, ValueError):
            return body, []
        if not last:
            return body, []
        end = history.rfind(parts[-1])
        if 0 < end < MOST_BYTES:
            self._begun[kind] = (history[:end], messages)
        return msgspec.json.encode(fields | {kind.history: _ANY}), [*messages, *last[0]]


def _messages_in(kind: type[AgentRequest], part: bytes) -> list[Json]:
    """Return the messages that items, between commas, are. Raises ValueError."""
    items = b"[%b]" % part
    try:
        given = from_json(items)
    except ValueError:
        given = from_json(with_whole_characters(items))
    return kind.plain(given)


def with_whole_characters(text: bytes) -> bytes:
    """Return a JSON text with halves of surrogate pairs, and bytes of no text, as U+FFFD."""
    whole = text.decode(errors="replace")
    return _ESCAPE.sub(lambda found: "\ufffd" if found[1] else found[0], whole).encode()
