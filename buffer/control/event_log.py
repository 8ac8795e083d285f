"""What happened in a run: one short entry per transition, in a capped stream that the scripts
write.
"""

from __future__ import annotations

from typing import Any

from buffer.store.keys import Keys
from buffer.store.store import Store

Event = tuple[int, str, dict[str, str]]
"""(ms since the epoch, name, fields)"""

START = "0"
"""Before the oldest event that is kept."""


class EventLog:
    """Reads the events of one run. An event's id says where it stands; more can be read from there."""

    def __init__(self, store: Store, keys: Keys) -> None:
        self._store = store
        self._keys = keys

    def newest(self) -> str:
        """The id of the newest event; START where there is none."""
        found: Any = self._store.retrying(
            "events", lambda: self._store.control.xrevrange(self._keys.events, count=1)
        )
        return found[0][0].decode() if found else START

    def read(
        self, after: str = START, *, limit: int = 500, block_ms: int | None = None
    ) -> list[tuple[str, Event]]:
        """(id, event) of the events behind an id, oldest first; waits up to `block_ms` where there
        is none.
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
    """An entry of the events stream."""
    identity = entry[0].decode()
    fields = {name.decode(): value.decode() for name, value in entry[1].items()}
    return int(identity.partition("-")[0]), fields.pop("event", "?"), fields
