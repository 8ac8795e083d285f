"""Remove every key of a run, in an order that may be interrupted anywhere.

    meta gets the schema REMOVING ─▶ control is removed ─▶ all other keys ─▶ meta

From the first step on, no process can open the run, and scripts refuse to claim, take or begin. The
run is listed until its `meta` is removed, so that an interrupted removal is noticed and repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from buffer.model.limits import REMOVING
from buffer.store.keys import Keys
from buffer.store.store import Store

SLICE = 500
"""Keys in one round trip."""

Advance = Callable[[int], object]


def remove_run(store: Store, keys: Keys, advance: Advance = lambda count: None) -> int:
    """Remove every key of a run; return how many.

    `advance` gets the number of keys removed in each slice. O(keys of the server), in slices that
    do not stall it. Raises StoreError.
    """
    store.retrying("remove", lambda: store.control.hset(keys.meta, "schema", REMOVING))
    removed = _remove(store, [keys.control])
    for _, client in store.servers.masters():
        for names in _slices(client, keys):
            count = _remove(store, names)
            removed += count
            advance(count)
    return removed + _remove(store, [keys.meta])


def _slices(client: Any, keys: Keys) -> Iterator[list[str]]:
    found = (key.decode() for key in client.scan_iter(keys.pattern, count=SLICE))
    others = (key for key in found if key != keys.meta)
    while names := list(islice(others, SLICE)):
        yield names


def _remove(store: Store, names: list[str]) -> int:
    # one by one: in a cluster they lie in different slots
    return sum(store.each("remove", [("UNLINK", name) for name in names]))
