"""The counters of a run, from its structures: accounts of the tasks, cursors, and bytes."""

from __future__ import annotations

from itertools import count as numbers

from buffer.maintenance.repair.batches import LEDGERS
from buffer.maintenance.repair.image import Hash, Value
from buffer.maintenance.repair.records import count, is_count, is_number
from buffer.maintenance.repair.state import Rebuilt
from buffer.model.ids import ENDS, IMPORTED_FROM

_TEXTS = {
    "enqueue_op", "order_by", "stopped", "error", "failing_worker", "halt", "halt_ops",
    "halt_reason",
}  # fmt: skip
"""Fields of an account that are not numbers."""


_FAR = 1000
"""Draws by which the reach of an account may exceed what exists."""


def accounts(state: Rebuilt) -> dict[str, Value]:
    """Return the account of each task, and the cursors."""
    found = {}
    cursors = {}
    for task in state.limits.tasks:
        fields = _readable(state.image.hash(f"progress:{task}"))
        counted = _draws(state, task, fields) | _stages(state, task)
        kept = {n: v for n, v in fields.items() if n not in counted}
        # a count of 0 may be missing
        changed = {n: str(v) for n, v in counted.items() if v or n in fields}
        found[f"progress:{task}"] = Value("hash", kept | changed)
        if counted["cursor"] or task in state.image.hash("cursors"):
            cursors[task] = str(counted["cursor"])
    return found | {"cursors": Value("hash", cursors)}


def _readable(fields: Hash) -> Hash:
    """Return the fields without numbers that are none: statistics begin anew."""
    return {
        name: value
        for name, value in fields.items()
        if name in _TEXTS or name.startswith("put:") or is_number(value)
    }


def _draws(state: Rebuilt, task: str, fields: Hash) -> dict[str, int]:
    existing = state.living(task).union(*state.ends[task].values())
    drawn = {draw for draw in existing if draw < IMPORTED_FROM}
    cursor = next(draw for draw in numbers() if draw not in drawn)
    believed = state.image.hash("cursors").get(task)
    if believed is not None and is_count(believed):
        # draws ahead of it are passed over
        cursor = min(cursor, int(believed))
    reach = max(drawn, default=-1) + 1
    outside = len(existing) - len(drawn)
    put = min(count(fields.get("put")), outside)
    return {
        "cursor": cursor,
        "enqueued": len(drawn),
        "reentered": len(drawn) - cursor,
        "highest_draw": _reach(fields.get("highest_draw"), cursor, reach),
        "put": put,
        "imported": outside - put,
    }


def _reach(text: str | None, cursor: int, drawn: int) -> int:
    """Return the draw before which fsck looks for groups: at least behind all that were drawn."""
    reach = count(text)
    if drawn > cursor:
        # it stays where a draw is revived: a reach that is somewhat too far costs fsck time only
        return reach if drawn <= reach <= drawn + _FAR else drawn
    return reach if reach <= cursor + _FAR else 0


def _stages(state: Rebuilt, task: str) -> dict[str, int]:
    own = [record for record in state.records.values() if record["task"] == task]
    counts = {stage: 0 for stage in ("running", "taken", "dead")}
    for record in own:
        if record["stage"] in counts:
            counts[record["stage"]] += 1
    counts |= {end: len(state.ends[task][end]) for end in ENDS}
    counts["consumed"] = counts["taken"] + counts["archived"]
    arrivals = [count(record.get("arrival")) for record in own]
    known = count(state.image.hash(f"progress:{task}").get("arrivals"))
    counts["arrivals"] = max([known, *arrivals])
    return counts


def byte_count(state: Rebuilt) -> dict[str, Value]:
    """Return the count of payload bytes: what went stays, what came is what went and is held."""
    held = sum(
        int(record["prompt"]) + (int(record["size"]) if record["payload"] != "init" else 0)
        for record in state.records.values()
    )
    held += sum(int(line.split(" ")[3]) for line in archived_lines(state))
    fields = state.image.hash("bytes")
    went = count(fields.get("went"))
    came = fields.get("came", "")
    if not is_count(came) or int(came) - went != held:
        came = str(went + held)
    wanted = {"came": came, "went": str(went)}
    changed = {n: v for n, v in wanted.items() if v != "0" or n in fields}
    return {"bytes": Value("hash", changed)}


def archived_lines(state: Rebuilt) -> list[str]:
    """Return the lines of archived groups whose bytes are retained."""
    found = []
    for ledger in LEDGERS:
        fields = state.ledgers[ledger]
        for _, *lines in state.archived[ledger].values():
            found += lines
        for _, *lines in [state.batches[ledger].get(count(fields.get("freed")) + 1, [""])]:
            found += lines[: count(fields.get("slice"))]
    return [line for line in found if line.partition(" ")[0] not in state.records]
