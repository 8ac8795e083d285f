"""The end of a run on its server: every key of it is removed, in an order that may be interrupted
anywhere.

    meta says REMOVING, then control goes, then everything else, then meta

From then on nobody opens the run, and no script lets anybody claim, take or begin. As long as
`meta` is there the run is still listed, so that a removal that was interrupted is seen, and
repeated.
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
    """Remove every key of a run; returns how many. `advance` hears how many, now and then.

    O(keys of the server), in slices that stall nobody. Raises StoreError.
    """
    store.retrying("remove", lambda: store.control.hset(keys.meta, "schema", REMOVING))
    removed = _remove(store, store.control, [keys.control])
    for _, client in store.servers.masters():
        for names in _slices(client, keys):
            count = _remove(store, client, names)
            removed += count
            advance(count)
    return removed + _remove(store, store.control, [keys.meta])


def _slices(client: Any, keys: Keys) -> Iterator[list[str]]:
    found = (key.decode() for key in client.scan_iter(keys.pattern, count=SLICE))
    others = (key for key in found if key != keys.meta)
    while names := list(islice(others, SLICE)):
        yield names


def _remove(store: Store, client: Any, names: list[str]) -> int:
    # one by one: in a cluster they lie in different slots
    pipe = client.pipeline(transaction=False)
    for name in names:
        pipe.unlink(name)
    return sum(store.retrying("remove", pipe.execute))
