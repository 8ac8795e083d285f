"""Keeps what `take_batch` reads in order: clears what is too stale out of the way, and fills what
is missing.

Scripts never search without a bound. Where too many stale groups stand before the fresh ones, or
the index does not hold every ready group (the policy was changed, or a worker of before still
submits), they say so and change nothing.
"""

from __future__ import annotations

from buffer.model.limits import RunLimits
from buffer.store.keys import Keys
from buffer.store.replies import unfenced
from buffer.store.scripts import Arg
from buffer.store.store import Store

_SLICE = 250


def expire_all(
    store: Store, keys: Keys, limits: RunLimits, task: str, status: str, limit: int = _SLICE
) -> int:
    """Expire all stale groups of a pool, slice by slice; return how many there were."""
    moved = 0
    while (some := expire(store, keys, limits, task, status, limit)) == limit:
        moved += some
    return moved + some


def expire(store: Store, keys: Keys, limits: RunLimits, task: str, status: str, limit: int) -> int:
    """Move up to `limit` groups out of a pool that are too stale for the next train step.

    Returns how many there were.
    """
    _, moved = store.call(
        "refresh",
        keys.slots(task=task, status=status),
        {
            "threshold": limits.stale_threshold,
            "limit": limit,
            "retryable": int(limits.retries_expired(task)),
        },
    )
    return int(moved)


def fill_index(store: Store, keys: Keys, limits: RunLimits, nonce: Arg, task: str) -> None:
    """Add ready groups that the order index lacks, slice by slice. Raises Fenced."""
    start = 0
    scanned = _SLICE
    while scanned == _SLICE:
        reply = store.call(
            "reorder",
            keys.slots(task=task),
            {"nonce": nonce, "policy": limits.order, "start": start, "limit": _SLICE},
        )
        scanned = int(unfenced(reply, "trainer")[1])
        start += scanned
