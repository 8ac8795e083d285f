"""The keys of the scripts that a worker calls, by slot, for workers in other languages (`rolloutmq scripts --json`)."""

from __future__ import annotations

from buffer.keys import Keys

SCRIPTS = ("register", "heartbeat", "claim", "submit", "release", "deregister")

_TASK, _WORKER = "<task>", "<worker>"


def worker_keys() -> dict[str, str]:
    """What stands behind `rmq:{RUN}:`, with `<task>` and `<worker>` to be filled in."""
    keys = Keys("any")
    named = {
        **{name: getattr(keys, name) for name in _OF_THE_RUN},
        "worker": keys.worker(_WORKER),
        "holds": keys.holds(_WORKER),
        "bell": keys.bell("receipts"),
        "ledger": keys.ledger("train"),
        "progress": keys.progress(_TASK),
        "filtered": keys.ended(_TASK, "filtered"),
        "order": keys.order(_TASK),
        **{f"bell_{who}": keys.bell(who) for who in ("workers", "producer", "trainer")},
        **{f"jobs_{lane}": keys.jobs(_TASK, lane) for lane in ("resume", "eval")},
        **{status: keys.pool(_TASK, status) for status in ("completed", "aborted", "expired")},
    }
    return {slot: key.removeprefix(keys.prefix) for slot, key in named.items()}


_OF_THE_RUN = (
    "meta", "control", "clock", "lineages", "leases", "garbage", "unpinned", "bytes", "suspects", "dead", "workers",
    "events", "groups", "dead_letters",
)  # fmt: skip
