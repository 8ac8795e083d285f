"""What a run waits for, since when, and what to do about it: from one snapshot, without a payload."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from buffer.control.fleet import WorkerRecord
from buffer.control.role_holder import RoleHolder
from buffer.monitoring.run_view import Snapshot, TaskView
from rolloutmq.output import age, plural

Level = Literal["note", "stuck", "fault"]

PATIENCE_MS = 30_000
"""A pause of the trainer, or a wait, that is shorter needs no explanation."""


@dataclass(frozen=True, slots=True)
class Symptom:
    """`what` is the case, for `since_ms` (None: unknown); `fix` is what to do ("" where nothing
    is).
    """

    level: Level
    what: str
    since_ms: int | None
    fix: str


def diagnose(snap: Snapshot) -> list[Symptom]:
    """All that keeps, or soon will keep, this run from going on; the worst first. Empty: nothing
    does.
    """
    if snap.mode == "finish":
        over = Symptom("note", "the run is finished: its last step was done", snap.paused_ms, "")
        return [*_account(snap), over, *_dead(snap)]
    found = [
        *_account(snap),
        *_pauses(snap),
        *_role(
            snap, snap.trainer, "trainer", "`rolloutmq train CONFIG`, or `rolloutmq run CONFIG`"
        ),
        *_role(
            snap,
            snap.producer,
            "producer",
            "`rolloutmq producer CONFIG`, or `rolloutmq run CONFIG`",
        ),
        *_workers(snap),
        *_weights(snap),
        *_unclaimed(snap),
        *_leases(snap),
        *_memory(snap),
        *_stopped(snap),
        *_curriculum(snap),
        *_supply(snap),
        *_recovery(snap),
        *_dead(snap),
    ]
    return worst_first(found)


def worst_first(symptoms: Iterable[Symptom]) -> list[Symptom]:
    order: tuple[Level, ...] = ("fault", "stuck", "note")
    return sorted(symptoms, key=lambda symptom: order.index(symptom.level))


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
        yield Symptom(
            "stuck", f"paused by an operator ({snap.mode})", snap.paused_ms, "`rolloutmq continue`"
        )
    elif snap.paused_by == "trainer":
        yield _trainer_pause(snap)


def _trainer_pause(snap: Snapshot) -> Symptom:
    late = sorted({worker.id for worker in snap.live_workers} - set(snap.acknowledged))
    level: Level = "stuck" if snap.paused_ms > PATIENCE_MS else "note"
    what = f"paused by the trainer ({snap.mode}), for a weight update"
    if snap.is_orphaned:
        fix = "start it again, it goes on by itself; or `rolloutmq continue` lets the workers go on without it"
        return Symptom("stuck", f"{what}; but that trainer is gone", snap.paused_ms, fix)
    if not late:
        return Symptom(
            level,
            f"{what}; every live worker has confirmed",
            snap.paused_ms,
            "see the trainer's log",
        )
    fix = f"see the log of {late[0]}; `rolloutmq fence {late[0]} --yes` goes on without it"
    return Symptom(level, f"{what}; it waits for {', '.join(late)}", snap.paused_ms, fix)


def _role(snap: Snapshot, role: RoleHolder, name: str, start: str) -> Iterator[Symptom]:
    if role.is_alive:
        return
    if role.silent_ms is None:
        yield Symptom("stuck", f"no {name} was opened", _age_ms(snap), f"start one: {start}")
        return
    what = f"the {name} is silent" if role.word == "silent" else f"the {name} has left"
    fix = f"start it again: {start}; it goes on where it was"
    standby = "; one that stands by takes over by itself" if name == "producer" else ""
    yield Symptom("stuck", what, role.silent_ms, fix + standby)


def _age_ms(snap: Snapshot) -> int:
    """Since the run was made."""
    return max(0, snap.now_ms - int(snap.meta["created_ms"]))


def _workers(snap: Snapshot) -> Iterator[Symptom]:
    if not snap.live_workers:
        what = (
            f"no worker is alive; {plural(snap.places.get('waiting', 0), 'group')} waiting for one"
        )
        since = min((worker.silent_ms for worker in snap.workers), default=_age_ms(snap))
        yield Symptom("stuck", what, since, "`rolloutmq worker CONFIG`")
    for worker in snap.workers:
        if worker.is_barred:
            yield _barred(worker, snap)
        if worker not in snap.live_workers:
            what = f"worker {worker.id} is silent and holds {plural(worker.holds, 'group')}"
            fix = "nothing to do: they are generated elsewhere once its leases have run out"
            yield Symptom("note", what, worker.silent_ms, fix)


def _barred(worker: WorkerRecord, snap: Snapshot) -> Symptom:
    others = [other for other in snap.live_workers if not other.is_barred]
    bad = plural(worker.bad_groups or 0, "group")
    what = f"worker {worker.id} is barred: it handed in {bad} that the trainer cannot use"
    what += "" if others else "; no other is alive"
    fix = f"`rolloutmq dead` says why; mend it, then `rolloutmq continue --worker {worker.id}`"
    return Symptom("note" if others else "stuck", what, worker.barred_for_ms, fix)


def _weights(snap: Snapshot) -> Iterator[Symptom]:
    newest = str(snap.weights)
    behind = [worker for worker in snap.live_workers if worker.weights != newest]
    if not behind:
        return
    level: Level = "stuck" if len(behind) == len(snap.live_workers) else "note"
    names = ", ".join(f"{worker.id} has {worker.weights or 'none'}" for worker in behind)
    what = f"the newest weights are {newest}, but {names}; they claim nothing until they have them"
    since = (
        max(0, snap.now_ms - int(snap.control["weights_ms"]))
        if "weights_ms" in snap.control
        else None
    )
    yield Symptom(
        level, what, since, f"can they read {snap.control.get('weights_path', '')}? see their logs"
    )


def _unclaimed(snap: Snapshot) -> Iterator[Symptom]:
    """Groups wait, workers beat, and nothing happens: they serve other tasks or lanes, or have
    stopped to listen.
    """
    quiet_ms = last_event_ms(snap)
    waiting = snap.places.get("waiting", 0)
    can_claim = [worker for worker in snap.live_workers if worker.weights == str(snap.weights)]
    if (
        waiting
        and can_claim
        and not snap.leases
        and snap.mode == "run"
        and (quiet_ms or 0) > PATIENCE_MS
    ):
        names = ", ".join(f"{worker.id} ({worker.state})" for worker in can_claim)
        fix = (
            "do they serve these tasks ([worker] tasks, lanes)? see their logs, or start them again"
        )
        yield Symptom(
            "stuck",
            f"{plural(waiting, 'group')} waiting, and nobody claims them: {names}",
            quiet_ms,
            fix,
        )


def _leases(snap: Snapshot) -> Iterator[Symptom]:
    if snap.overdue:
        what = f"{plural(snap.overdue, 'lease')} ran out, and nobody has taken them back"
        yield Symptom("note", what, None, "any worker, producer or trainer of the run does it")
    live = snap.live_workers
    holders = [worker for worker in live if worker.holds]
    if len(holders) == 1 and len(live) > 1 and snap.leases > 1 and not snap.places.get("waiting"):
        what = f"all {snap.leases} running groups are with {holders[0].id}; {plural(len(live) - 1, 'worker')} idle"
        yield Symptom(
            "note", what, None, "a lower concurrency per worker spreads the end of a batch better"
        )


def _memory(snap: Snapshot) -> Iterator[Symptom]:
    memory = snap.memory
    if not memory.refuses_fresh:
        return
    left = snap.taken - snap.committed
    fix = (
        "the trainer writes a checkpoint and commits" if left else "a larger [memory] budget_bytes"
    )
    what = f"the run holds {memory}: {'nothing is' if memory.refuses_all else 'no new prompt is'} started"
    yield Symptom("note", f"{what}; {left} taken batches are not committed", None, fix)


def _stopped(snap: Snapshot) -> Iterator[Symptom]:
    for task in snap.tasks:
        if task.is_stopped:
            failures = int(task.number("failures_in_row"))
            what = f"task {task.account.task} is stopped: {failures} tries failed or were filtered one after the other"
            fix = f"`rolloutmq dead` says why; then `rolloutmq continue --task {task.account.task}`"
            yield Symptom("stuck", what, None, fix)
        halt = task.progress.get("halt", "")
        reason = task.progress.get("halt_reason", "")
        if halt == "broken":
            fix = f"mend it, then `rolloutmq continue --task {task.account.task}`"
            yield Symptom("stuck", f"task {task.account.task} is stopped: {reason}", None, fix)
        elif halt == "enough":
            what = f"task {task.account.task} has enough up to step {task.progress['halt_step']}, says its {reason}"
            yield Symptom("note", what, None, "that batch is as large as what is ready")


def _curriculum(snap: Snapshot) -> Iterator[Symptom]:
    if reason := snap.control.get("curriculum_error"):
        what = f"task weights stay what they are since step {snap.control['curriculum_step']}: {reason}"
        yield Symptom(
            "note",
            what,
            None,
            "mend the function of [plan] curriculum, and start the producer again",
        )


def _supply(snap: Snapshot) -> Iterator[Symptom]:
    quiet_ms = last_event_ms(snap)
    for task in snap.training:
        if task.account.target and task.account.waiting + task.account.running == 0:
            yield _dry(task, quiet_ms)


def _dry(task: TaskView, quiet_ms: int | None) -> Symptom:
    wanted = max(1, task.asked)
    account = task.account
    what = f"{account.task}: {task.ready} of {wanted} groups are ready, nothing waits or runs"
    if task.ready >= wanted:
        return Symptom("note", f"{what}: the trainer is the slow part", quiet_ms, "")
    if account.aborted + account.expired:
        what += f"; {account.aborted} aborted and {account.expired} expired groups are parked"
        fix = "the producer reissues them: see its log and [strategy] tail_batch_trigger_size"
        return Symptom("stuck", what, quiet_ms, fix)
    return Symptom("stuck", what, quiet_ms, "the producer enqueues nothing: see its log")


def _recovery(snap: Snapshot) -> Iterator[Symptom]:
    if snap.control.get("recovering"):
        what = "a trainer began to open the run and did not finish"
        yield Symptom(
            "stuck", what, snap.trainer.silent_ms, "start the trainer again: it repeats that"
        )


def _dead(snap: Snapshot) -> Iterator[Symptom]:
    if snap.dead:
        fix = "`rolloutmq ls --stage dead` lists them, `rolloutmq show GID` says why"
        yield Symptom("note", plural(snap.dead, "dead letter"), None, fix)


def describe(symptom: Symptom) -> str:
    """One symptom as one line."""
    since = f", for {age(symptom.since_ms)}" if symptom.since_ms is not None else ""
    return f"{symptom.what}{since}"
