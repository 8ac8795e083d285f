"""What only the launcher of a run knows: restarts, exit codes, signals, memory, and a full disk.

`explain_folder` reads it from the run's folder, also once the run is over and its server is lost.
`with_processes` puts it before what the server knows: an ended process is a cause, and what others
wait for then is not.
"""

from __future__ import annotations

import shlex
import socket
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from buffer.redis.server.embedded import full_disk
from buffer.redis.url import mask_url
from consumer.config.trainer import LEARNING
from consumer.learning.findings import EFFECTS
from rolloutmq.output import age
from rolloutmq.process_ends import ProcessEnd, ProcessStart, read_processes
from rolloutmq.run_owner import LaunchRecord, Stage, is_owned, read_record
from rolloutmq.views.explain.symptom import Symptom, fault, note, stuck, warning, worst_first
from rolloutmq.views.run_view import RunView

RECENT_S = 600.0  # a process that has lived so long since its last death is well again
LOST_ROLES = frozenset(
    f"{who}/{how}"
    for who in ("trainer", "producer", "worker", "pause")
    for how in ("gone", "never_started", "opening", "none", "orphaned")
)
"""Findings that say only that a process is not there."""

FIXES = {
    "disk/full": "free some space on that disk: lower [trainer] keep_checkpoints or keep_weights",
    "process/out_of_memory": "give it less to hold, or the machine more memory",
    "process/killed": "by a person, a batch system or a container's limit: `dmesg` may say more",
    "process/failed": "its log says more",
}

Lines = list[ProcessStart | ProcessEnd]


def explain_folder(folder: Path, snap: RunView | None = None) -> list[Symptom]:
    """Return what the launcher of the newest start wrote, the worst first; [] without one.

    `snap`: the run as its server knows it, without which no process is missed.
    """
    record = read_record(folder)
    if record is None:
        return []
    lives = is_owned(folder)
    lines = read_processes(folder, record.started - 1.0)
    found = [] if lives else [*_end_of_run(folder, record, snap)]
    found += _deaths(lines, record.ended_by, is_running=lives)
    if lives and snap:
        found += _missing(lines, snap)
    if (said := full_disk(folder)) and not any(each.name == "disk/full" for each in found):
        found.append(fault("disk/full", said, FIXES["disk/full"]))
    return worst_first(found)


def with_processes(
    snap: RunView, symptoms: Iterable[Symptom], folder: Path | None
) -> list[Symptom]:
    """Return all findings, the worst first, without advice that they make wrong."""
    own = explain_folder(folder, snap) if folder else []
    found, wrong = [*own, *symptoms], set[str]()
    unwell = ("launcher/killed", "process/hung", "process/loading")
    if any(each.name in unwell or each.level in ("fault", "stuck") for each in own):
        wrong |= LOST_ROLES
    if any(each.name.removeprefix(LEARNING) in EFFECTS["response_limit"] for each in found):
        wrong.add("share/truncated")  # a larger limit would only let them grow
    if any(each.level in ("fault", "stuck") and each.name not in wrong for each in found):
        # more or fewer workers would not help
        wrong.add("supply/trainer_bound")
        found = [replace(each, fix="") if each.name == "waits/summary" else each for each in found]
    return worst_first(each for each in found if each.name not in wrong)


def _end_of_run(folder: Path, record: LaunchRecord, snap: RunView | None) -> Iterator[Symptom]:
    """Report how the launcher ended, unless processes that were started since continue the run."""
    if snap and snap.trainer.is_alive:
        return
    again = f"`rolloutmq run {mask_url(shlex.join(record.command))}` continues the run"
    if record.stage is Stage.DIED and record.host == socket.gethostname():
        what = f"`rolloutmq run` (process {record.pid} on {record.host}) was killed, and its "
        yield stuck("launcher/killed", f"{what}processes with it", again)
    elif record.stage is Stage.FAILED:
        name = record.ended_by.kind if record.ended_by else "run/failed"
        what = "; ".join(line.strip() for line in record.detail.splitlines())
        first = FIXES.get(name, "mend this")
        yield fault(name, f"the run has ended: {what}", f"{first}; then {again}")


def _deaths(lines: Lines, told: ProcessEnd | None, *, is_running: bool) -> Iterator[Symptom]:
    """Report the deaths of each process by their kind, but those that ended the run.

    Those on a full disk are reported together.
    """
    found: dict[tuple[str, str], list[ProcessEnd]] = {}
    for end in lines:
        if isinstance(end, ProcessEnd) and end.kind != "process/stopped":
            who = "" if end.kind == "disk/full" else end.name
            found.setdefault((who, end.kind), []).append(end)
    if told:
        found.pop(("" if told.kind == "disk/full" else told.name, told.kind), None)
    for (_, kind), ends in found.items():
        newest = ends[-1]
        ago_s = max(0.0, time.time() - newest.at_s)
        names = ", ".join(dict.fromkeys(end.name for end in ends))
        often = f", {len(ends)} times" if len(ends) > 1 else ""
        often += f", {newest.fruitless} in a row without progress" if newest.fruitless > 1 else ""
        what = f"{names} {newest.how}{often}, {age(1000 * ago_s)} ago: {newest.why}"
        look = () if newest.name == "server" else (f"rolloutmq logs {newest.name}",)
        is_new = is_running and ago_s < RECENT_S
        level = (stuck if newest.fruitless > 1 else warning) if is_new else note
        yield level(kind, what, FIXES[kind], look=look)


def _missing(lines: Lines, snap: RunView) -> Iterator[Symptom]:
    """Report processes that run, and that the server does not hear, or has not heard yet."""
    silent_ms: dict[str, int | None] = {
        role.role: role.silent_ms for role in (snap.trainer, snap.producer) if not role.is_alive
    }
    known = {worker.id: worker for worker in (*snap.ended_workers, *snap.workers)}
    newest = {line.name: line for line in lines}
    workers = [name for name in newest if name.startswith("worker-")]
    for name in workers:
        if not (name in known and known[name].is_live(snap.lease_ms)):
            silent_ms[name] = known[name].silent_ms if name in known else None
    for name, silent in silent_ms.items():
        last = newest.get(name)
        if last is None or isinstance(last, ProcessEnd):
            continue
        age_ms = int(1000 * (time.time() - last.at_s))
        if silent is None or silent >= age_ms:
            what = f"{name} was started, and loads its model or data"
            yield note("process/loading", what, "nothing, or read its log", age_ms)
        else:
            what = f"{name} (process {last.pid}) runs, and does not answer"
            fix = f"read its log; `kill -9 {last.pid}` makes `rolloutmq run` start it again"
            is_needed = name not in known or not snap.live_workers
            yield (stuck if is_needed else warning)("process/hung", what, fix, silent)
