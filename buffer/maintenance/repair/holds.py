"""What workers hold, from the records of running groups (I2).

The workers themselves are forgotten: those that live register again, and the leases of the others
run out as usual.
"""

from __future__ import annotations

from collections import defaultdict

from buffer.ids import NAME
from buffer.job import digest_of_pairs
from buffer.maintenance.repair.image import Hash, Value
from buffer.maintenance.repair.records import queue_of
from buffer.maintenance.repair.state import Rebuilt


def rest(state: Rebuilt) -> None:
    """Return the groups to the queue that no worker is known to hold; with their try."""
    left = [
        record
        for record in state.records.values()
        if record["stage"] == "running" and not _is_held(record)
    ]
    for record in left:
        tries = max(0, int(record["tries"]) - 1)
        lane = queue_of(record, state.limits)
        record |= {"stage": "waiting", "lane": lane, "tries": str(tries)}
        record |= {"token": "", "owner": "", "entry": ""}
    if left:
        state.notes.append(f"{len(left)} groups that no worker holds wait again")


def _is_held(record: Hash) -> bool:
    names = (record.get("owner", ""), record.get("token", ""))
    return all(NAME.fullmatch(name) for name in names)


def holds(state: Rebuilt) -> dict[str, Value]:
    """Return the tokens that workers hold, and their leases; a lease that is lost has run out."""
    held = defaultdict[str, dict[str, str]](dict)
    for gid, record in state.records.items():
        if record["stage"] == "running":
            held[record["owner"]][gid] = record["token"]
    deadlines = state.image.zset("leases")
    leases = {worker: deadlines.get(worker, float(state.now_ms)) for worker in held}
    found = {"leases": Value("zset", leases)}
    for worker, tokens in held.items():
        digest = str(digest_of_pairs(tokens.items()))
        found[f"holds:{worker}"] = Value("hash", tokens | {"digest": digest})
    return found
