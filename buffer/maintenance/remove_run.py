"""Remove the keys of a run, in an order that may be interrupted anywhere.

    meta gets the schema REMOVING ─▶ control is removed ─▶ all other keys ─▶ meta

From the first step on, no process can open the run, and no script writes a key of it (`missing_run`
in `lua/shared/control.lua`). The run is listed until its `meta` is removed, so that an interrupted
removal can be repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import chain, islice

from buffer.limits import REMOVING
from buffer.redis.bounds import KEYS_PER_TRIP
from buffer.redis.bulk_io import send
from buffer.redis.keys import Keys
from buffer.redis.store import Store

Advance = Callable[[int], object]


def remove_run(store: Store, keys: Keys, advance: Advance = lambda count: None) -> int:
    """Remove every key of a run, and of its judges on this server; return how many.

    Raises StoreError.

    `advance` gets the number of keys removed in each slice. O(keys of the server), without a stall.
    """
    store = store.at(keys.meta)  # which may lie on another node than the run of this store
    store.ask("remove", "HSET", keys.meta, "schema", REMOVING)
    removed: int = store.ask("remove", "UNLINK", keys.control)
    patterns = (f"{keys.prefix}*", *keys.judge_patterns)
    removed += _clear(store, patterns, {keys.meta.encode()}, advance)
    return removed + int(store.ask("remove", "UNLINK", keys.meta))


def clear_keys(
    store: Store, keys: Keys, but: Collection[str], advance: Advance = lambda count: None
) -> int:
    """Remove every key of a run `but` a few, of any type; return how many. Raises StoreError.

    The next walk finds a key that a process wrote behind this one; without records, none can write
    a group.
    """
    return _clear(store, (f"{keys.prefix}*",), {name.encode() for name in but}, advance)


def _clear(store: Store, patterns: Sequence[str], kept: Collection[bytes], advance: Advance) -> int:
    def walk() -> int:
        removed = 0
        for _, client in store.servers.masters():
            walks = (client.scan_iter(pattern, count=KEYS_PER_TRIP) for pattern in patterns)
            found = (key for key in chain.from_iterable(walks) if key not in kept)
            while names := list(islice(found, KEYS_PER_TRIP)):
                # one by one: in a cluster they lie in different slots
                count = sum(send(client, [("UNLINK", name) for name in names]))
                removed += count
                advance(count)
        return removed

    total = 0
    for _ in range(8):  # a live process may write some for ever, such as its heartbeat
        count = store.retrying("remove", walk)
        total += count
        if not count:
            break
    return total
