"""Prepares pools to be taken in order: expires stale groups, and fills the order index.

Scripts never search without a bound. Where too many stale groups stand before the fresh ones, or
the index lacks ready groups (the policy was changed, or a worker still submits under the old one),
they report that and change nothing; the caller then calls a function of this file.
"""

from __future__ import annotations

from buffer.model.limits import RunLimits
from buffer.redis.keys import Keys
from buffer.redis.replies import unfenced
from buffer.redis.scripts import Arg
from buffer.redis.store import Store

_SLICE = 250
"""Groups that one call moves or adds: the server answers other clients in between."""


AGING = ("completed", "aborted")
"""The pools whose groups become too stale."""


def expire_all(
    store: Store,
    keys: Keys,
    limits: RunLimits,
    task: str,
    status: str,
    limit: int = _SLICE,
    threshold: int | str | None = None,
) -> int:
    """Expire all stale groups of a pool, slice by slice; return how many there were.

    `threshold`: in train steps; None: that of the task.
    """
    moved = 0
    while (some := expire(store, keys, limits, task, status, limit, threshold)) == limit:
        moved += some
    return moved + some


def expire(
    store: Store,
    keys: Keys,
    limits: RunLimits,
    task: str,
    status: str,
    limit: int,
    threshold: int | str | None = None,
) -> int:
    """Move up to `limit` groups out of a pool that are too stale for the next train step.

    Returns how many there were.
    """
    _, moved = store.call(
        "refresh",
        keys.slots(task=task, status=status),
        {
            "threshold": limits.threshold(task) if threshold is None else threshold,
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
