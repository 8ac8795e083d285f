"""Read the events of a run: one short entry per transition, in a capped stream."""

from __future__ import annotations

from typing import Any

from buffer.redis.key_fields import text_fields
from buffer.redis.keys import Keys
from buffer.redis.store import Store

Event = tuple[int, str, dict[str, str]]
"""Milliseconds since 1970, name, fields."""

START = "0"
"""The position before the oldest event that is kept."""


class EventLog:
    """Reads the events of one run; the id of an event is the position from which to continue.

    Usage:
        for position, (ms, name, fields) in run.events.read(block_ms=1000): ...
    """

    def __init__(self, store: Store, keys: Keys) -> None:
        self._store = store
        self._keys = keys

    def newest(self) -> str:
        """Return the id of the newest event; START if there is none."""
        found: Any = self._store.retrying(
            "events", lambda: self._store.control.xrevrange(self._keys.events, count=1)
        )
        return found[0][0].decode() if found else START

    def read(
        self, after: str = START, *, limit: int = 500, block_ms: int | None = None
    ) -> list[tuple[str, Event]]:
        """Return (id, event) of the events after an id, oldest first.

        Waits up to `block_ms` if there is none.
        """
        key = self._keys.events
        reply: Any = self._store.retrying(
            "events", lambda: self._store.control.xread({key: after}, count=limit, block=block_ms)
        )
        if not reply:
            return []
        entries = next(iter(reply.values())) if isinstance(reply, dict) else reply[0][1]
        # RESP3 wraps the entries of a stream in one more list
        entries = entries[0] if entries and isinstance(entries[0], list) else entries
        return [(entry[0].decode(), parse_event(entry)) for entry in entries]


def parse_event(entry: tuple[bytes, dict[bytes, bytes]]) -> Event:
    """Return the event in an entry of the stream."""
    identity = entry[0].decode()
    fields = text_fields(entry[1])
    return int(identity.partition("-")[0]), fields.pop("event", "?"), fields
