"""Keeps what `take_batch` reads in order: clears what is too stale out of the way, and fills what
is missing.

Scripts never search without a bound. Where too many stale groups stand before the fresh ones, or
the index does not hold every ready group (the policy was changed, or a worker of before still
submits), they say so and change nothing.
"""

from __future__ import annotations

from collections.abc import Callable

from buffer.errors import Fenced, ScriptError
from buffer.model.limits import RunLimits
from buffer.store.keys import Keys
from buffer.store.store import Store

_SLICE = 250
_PASSES = 20


def in_order(
    store: Store, keys: Keys, limits: RunLimits, nonce: str, call: Callable[[], list[str]]
) -> list[str]:
    """The reply of `call`, a script that takes in order, once nothing stands in its way. Raises
    Fenced.
    """
    for _ in range(_PASSES):
        reply = call()
        if reply[0] == "BLOCKED":
            expire_all(store, keys, limits, reply[1], "completed")
        elif reply[0] == "UNORDERED":
            _fill(store, keys, limits, nonce, reply[1])
        else:
            return reply
    raise ScriptError(f"the order of {reply[1]} is never settled: {reply[0]}")


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


def _fill(store: Store, keys: Keys, limits: RunLimits, nonce: str, task: str) -> None:
    """Add to the index what is ready and not in it, slice by slice."""
    start = 0
    scanned = _SLICE
    while scanned == _SLICE:
        reply = store.call(
            "reorder",
            keys.slots(task=task),
            {"nonce": nonce, "policy": limits.order, "start": start, "limit": _SLICE},
        )
        if reply[0] == "FENCED":
            raise Fenced("this is no longer the trainer of the run: another one was opened")
        scanned = int(reply[1])
        start += scanned
