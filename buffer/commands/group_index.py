"""Finds groups through the indexes of a run (streams, leases, pools, manifests, dead letters), never by a key scan.

What it lists is of different instants: on a live run a group may move while it is looked for. For proof use `fsck`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from buffer.keys import LANES, POOLS, split_group_id
from buffer.ledger import BatchLedger
from buffer.run import Run

STAGES = ("waiting", "running", "pool", "taken", "dead")

_SLICE = 500


@dataclass(frozen=True, slots=True)
class GroupRow:
    """The short facts of one group. `staleness` counts up to the step that took it, or to the next step."""

    gid: str
    stage: str
    status: str
    version: int | None
    staleness: int | None
    tries: int
    owner: str
    samples: int
    tokens: int
    reward: float | None
    batch: str


def find_groups(
    run: Run, *, task: str | None = None, status: str | None = None, stage: str | None = None, limit: int = 50
) -> list[GroupRow]:
    """Up to `limit` groups that fit, in the order in which they will be served."""
    taken = run.ledger.steps()[0]
    tasks = [task] if task else list(run.limits.tasks)
    found = _candidates(run, tasks, [stage] if stage else list(STAGES), status)
    rows: list[GroupRow] = []
    while len(rows) < limit and (gids := list(islice(found, _SLICE))):
        for record in _records(run, gids):
            if record and status in (None, record["status"]) and stage in (None, record.get("stage")):
                rows.append(_row(record, taken))
    return rows[:limit]


def _candidates(run: Run, tasks: list[str], stages: list[str], status: str | None) -> Iterator[str]:
    for stage in stages:
        if stage == "waiting":
            for task in tasks:
                yield from _waiting(run, task)
        elif stage == "pool":
            for task in tasks:
                yield from _pooled(run, task, status)
        elif stage == "taken":
            yield from _of(tasks, _taken(run))
        else:
            yield from _of(tasks, _by_time(run, run.keys.leases if stage == "running" else run.keys.dead))


def _of(tasks: list[str], gids: Iterator[str]) -> Iterator[str]:
    return (gid for gid in gids if split_group_id(gid)[0] in tasks)


def _waiting(run: Run, task: str) -> Iterator[str]:
    for lane in LANES:
        last = "-"
        while entries := _ask(run, "XRANGE", run.keys.jobs(task, lane), last, "+", "COUNT", _SLICE):
            yield from (fields[b"gid"].decode() for _, fields in entries)
            last = "(" + entries[-1][0].decode()


def _pooled(run: Run, task: str, status: str | None) -> Iterator[str]:
    for pool in [status] if status in POOLS else POOLS:
        for member in _by_time(run, run.keys.pool(task, str(pool))):
            yield member.partition(":")[2]


def _taken(run: Run) -> Iterator[str]:
    for ledger in (run.ledger, run.evaluations):
        yield from _manifests(ledger)


def _manifests(ledger: BatchLedger) -> Iterator[str]:
    taken, _, freed = ledger.steps()
    for step in range(freed + 1, taken + 1):
        if manifest := ledger.manifest(step):
            yield from manifest.gids


def _by_time(run: Run, key: str) -> Iterator[str]:
    start = 0
    while members := _ask(run, "ZRANGE", key, start, start + _SLICE - 1):
        yield from (member.decode() for member in members)
        start += _SLICE


def _ask(run: Run, *command: str | int) -> Any:
    control: Any = run.store.control
    return run.store.retrying("list", lambda: control.execute_command(*command))


def _records(run: Run, gids: list[str]) -> list[dict[str, str]]:
    """The records, each with its gid; without those that ended meanwhile."""

    def ask() -> list[dict[bytes, bytes]]:
        pipe = run.store.control.pipeline(transaction=False)
        for gid in gids:
            pipe.hgetall(run.keys.group(gid))
        return list(pipe.execute())

    found = run.store.retrying("records", ask)
    pairs = [(gid, {k.decode(): v.decode() for k, v in raw.items()}) for gid, raw in zip(gids, found, strict=True)]
    return [record | {"gid": gid} for gid, record in pairs if record]


def _row(record: dict[str, str], taken: int) -> GroupRow:
    version = int(record["version"]) if record.get("version") else None
    ledger, _, step = record.get("batch", "").rpartition(":")
    used_by = int(step) if ledger == "train" else taken + 1
    samples = int(record.get("samples", 0))
    # the scores of an interrupted group are not counted
    is_scored = record.get("status") == "completed" and record.get("reward") and samples
    return GroupRow(
        gid=record["gid"],
        stage=record.get("stage", ""),
        status=record.get("status", ""),
        version=version,
        staleness=None if version is None else used_by - version - 1,
        tries=int(record.get("tries", 0)),
        owner=record.get("owner", ""),
        samples=samples,
        tokens=int(record.get("tokens", 0)),
        reward=float(record["reward"]) / samples if is_scored else None,
        batch=record.get("batch", ""),
    )
