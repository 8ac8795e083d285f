"""What a run waits for, since when, and what to do about it: from one snapshot, without a payload."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from buffer.commands.screen import age
from buffer.commands.snapshot import RoleView, Snapshot, TaskView

PATIENCE_MS = 30_000
"""A pause of the trainer, or a wait, that is shorter needs no explanation."""


@dataclass(frozen=True, slots=True)
class Symptom:
    """`what` is the case, for `since_ms` (None: unknown); `fix` is what to do ("" where nothing is)."""

    level: Literal["note", "stuck", "fault"]
    what: str
    since_ms: int | None
    fix: str


def diagnose(snap: Snapshot) -> list[Symptom]:
    """All that keeps, or soon will keep, this run from going on; the worst first. Empty: nothing does."""
    found = [
        *_account(snap),
        *_pauses(snap),
        *_role(snap.trainer, "trainer", "`rolloutmq train CONFIG`, or `rolloutmq run CONFIG`"),
        *_role(snap.producer, "producer", "`rolloutmq producer CONFIG`, or `rolloutmq run CONFIG`"),
        *_workers(snap),
        *_weights(snap),
        *_leases(snap),
        *_supply(snap),
        *_recovery(snap),
        *_dead(snap),
    ]
    order = ("fault", "stuck", "note")
    return sorted(found, key=lambda symptom: order.index(symptom.level))


def last_event_ms(snap: Snapshot) -> int | None:
    """How long ago anything happened."""
    return max(0, snap.now_ms - snap.events[-1][0]) if snap.events else None


def _account(snap: Snapshot) -> Iterator[Symptom]:
    for fault in snap.faults:
        yield Symptom(
            "fault", fault, None, "`rolloutmq fsck` names the groups; keep the data folder as it is"
        )


def _pauses(snap: Snapshot) -> Iterator[Symptom]:
    if snap.paused_by == "operator":
        what = f"paused by an operator ({snap.mode})"
        yield Symptom("stuck", what, snap.paused_ms, "`rolloutmq continue`")
    elif snap.paused_by == "trainer":
        late = sorted({worker["id"] for worker in snap.live_workers} - set(snap.acknowledged))
        level: Literal["stuck", "note"] = "stuck" if snap.paused_ms > PATIENCE_MS else "note"
        what = f"paused by the trainer ({snap.mode}), for a weight update"
        if late:
            yield Symptom(level, f"{what}; it waits for {', '.join(late)}", snap.paused_ms,
                          f"see the log of {late[0]}; `rolloutmq fence {late[0]} --yes` goes on without it")  # fmt: skip
        else:
            yield Symptom(
                level, f"{what}; every live worker has confirmed", snap.paused_ms, "see the trainer's log"
            )


def _role(role: RoleView, name: str, start: str) -> Iterator[Symptom]:
    if role.alive:
        return
    what = {"silent": f"the {name} is silent", "closed": f"the {name} has left"}.get(
        role.word, f"no {name} was opened"
    )
    yield Symptom("stuck", what, role.silent_ms, f"start it again: {start}; it goes on where it was")


def _workers(snap: Snapshot) -> Iterator[Symptom]:
    waiting = snap.places.get("waiting", 0)
    if not snap.live_workers:
        yield Symptom(
            "stuck", f"no worker is alive; {waiting} groups wait for one", None, "`rolloutmq worker CONFIG`"
        )
    for worker in snap.workers:
        if worker not in snap.live_workers:
            yield Symptom("note", f"worker {worker['id']} is silent and holds {worker['holds']} groups",
                          int(worker["silent_ms"]), "nothing: they are generated elsewhere once its leases run out")  # fmt: skip


def _weights(snap: Snapshot) -> Iterator[Symptom]:
    newest = str(snap.weights)
    behind = [worker for worker in snap.live_workers if worker.get("weights") != newest]
    if not behind:
        return
    names = ", ".join(f"{worker['id']} has {worker.get('weights') or 'none'}" for worker in behind)
    level: Literal["stuck", "note"] = "stuck" if len(behind) == len(snap.live_workers) else "note"
    path = snap.control.get("weights_path", "")
    yield Symptom(level, f"the newest weights are {newest}, but {names}; they claim nothing until they have them",
                  None, f"can they read {path}? see their logs")  # fmt: skip


def _leases(snap: Snapshot) -> Iterator[Symptom]:
    if snap.overdue:
        yield Symptom("note", f"{snap.overdue} leases have run out and nobody has taken them back", None,
                      "any worker, producer or trainer of the run does it")  # fmt: skip
    holders = [worker for worker in snap.live_workers if int(worker["holds"])]
    if (
        len(holders) == 1
        and len(snap.live_workers) > 1
        and snap.leases > 1
        and not snap.places.get("waiting")
    ):
        only = holders[0]
        yield Symptom("note", f"all {only['holds']} running groups are with {only['id']}; "
                      f"{len(snap.live_workers) - 1} workers are idle", None,
                      "a lower concurrency per worker spreads the end of a batch better")  # fmt: skip


def _supply(snap: Snapshot) -> Iterator[Symptom]:
    quiet_ms = last_event_ms(snap)
    for task in snap.training:
        if task.account.target and task.account.waiting + task.account.running + task.account.judging == 0:
            yield from _dry(task, quiet_ms)


def _dry(task: TaskView, quiet_ms: int | None) -> Iterator[Symptom]:
    name, short = task.account.task, task.ready < max(1, task.asked)
    if not short:
        yield Symptom("note", f"{name}: {task.ready} groups are ready, nothing waits or runs: the trainer is the slow part",
                      quiet_ms, "")  # fmt: skip
    elif task.account.aborted + task.account.expired:
        parked = f"{task.account.aborted} aborted and {task.account.expired} expired groups are parked"
        yield Symptom("stuck", f"{name}: {task.ready} of {max(1, task.asked)} groups are ready, nothing waits or runs; {parked}",
                      quiet_ms, "the producer reissues them: see its log and [strategy] tail_batch_trigger_size")  # fmt: skip
    else:
        yield Symptom("stuck", f"{name}: {task.ready} of {max(1, task.asked)} groups are ready, nothing waits or runs",
                      quiet_ms, "the producer enqueues nothing: see its log")  # fmt: skip


def _recovery(snap: Snapshot) -> Iterator[Symptom]:
    if snap.control.get("recovering"):
        yield Symptom("stuck", "a trainer began to open the run and did not finish", snap.trainer.silent_ms,
                      "start the trainer again: it repeats the step")  # fmt: skip


def _dead(snap: Snapshot) -> Iterator[Symptom]:
    if snap.dead:
        yield Symptom("note", f"{snap.dead} groups are dead letters", None,
                      "`rolloutmq ls --stage dead` lists them, `rolloutmq show GID` says why")  # fmt: skip


def describe(symptom: Symptom) -> str:
    """One symptom as one line."""
    since = f", for {age(symptom.since_ms)}" if symptom.since_ms is not None else ""
    return f"{symptom.what}{since}"
