"""Find out what a run waits for, since when, and what to do, from one snapshot of its index."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from buffer.control.role_holder import RoleHolder
from buffer.control.task_status import TaskStop
from buffer.control.worker_record import WorkerRecord
from rolloutmq.output import age, plural
from rolloutmq.views.run_view import RunView, TaskView

Level = Literal["note", "stuck", "fault"]

PATIENCE_MS = 30_000
"""A pause of the trainer, or a wait, that is shorter is normal."""


MANY_FILTERED = 64
"""Groups in a row that were all filtered: a hard task may do so, but it is worth a note."""


@dataclass(frozen=True, slots=True)
class Symptom:
    """One finding: what is the case, for how many milliseconds (None: unknown), and what to do."""

    level: Level
    what: str
    since_ms: int | None
    fix: str


def diagnose(snap: RunView) -> list[Symptom]:
    """Return what stops the run, or soon will, the worst first; empty if nothing does.

    During a pause, no process loads weights or starts groups: only the pause itself is reported.
    """
    if snap.mode == "finish":
        over = Symptom("note", "the run is finished: its last step is done", snap.paused_ms, "")
        return [*_account(snap), over, *_dead(snap)]
    found = [
        *_account(snap),
        *_pauses(snap),
        *_role(snap, snap.trainer, "trainer", "`rolloutmq train CONFIG` or `rolloutmq run CONFIG`"),
        *_role(
            snap,
            snap.producer,
            "producer",
            "`rolloutmq producer CONFIG` or `rolloutmq run CONFIG`",
        ),
        *_slow_data_set(snap),
        *_workers(snap),
        *_failed_audits(snap),
        *(() if snap.paused_by else _weights(snap)),
        *_unclaimed(snap),
        *_leases(snap),
        *_memory(snap),
        *_stopped(snap),
        *_failing(snap),
        *_curriculum(snap),
        *(() if snap.paused_by else _supply(snap)),
        *_gone(snap),
        *_recovery(snap),
        *_dead(snap),
    ]
    return worst_first(found)


def worst_first(symptoms: Iterable[Symptom]) -> list[Symptom]:
    """Sort symptoms by level: fault, stuck, note."""
    order: tuple[Level, ...] = ("fault", "stuck", "note")
    return sorted(symptoms, key=lambda symptom: order.index(symptom.level))


def last_event_ms(snap: RunView) -> int | None:
    """Return how many milliseconds ago the last event was."""
    return max(0, snap.now_ms - snap.events[-1][0]) if snap.events else None


def _account(snap: RunView) -> Iterator[Symptom]:
    for fault in snap.faults:
        yield Symptom(
            "fault", fault, None, "`rolloutmq fsck` names the groups; keep the data folder as it is"
        )


def _pauses(snap: RunView) -> Iterator[Symptom]:
    if snap.paused_by == "operator":
        yield Symptom(
            "stuck", f"paused by an operator ({snap.mode})", snap.paused_ms, "`rolloutmq resume`"
        )
    elif snap.paused_by == "trainer":
        yield _trainer_pause(snap)


def _trainer_pause(snap: RunView) -> Symptom:
    late = sorted({worker.id for worker in snap.live_workers} - set(snap.acknowledged))
    level: Level = "stuck" if snap.paused_ms > PATIENCE_MS else "note"
    what = f"paused by the trainer ({snap.mode}), for a weight update"
    if snap.is_orphaned:
        fix = (
            "start the trainer again, and it continues by itself; or end the pause: "
            "`rolloutmq resume`"
        )
        return Symptom("stuck", f"{what}, but that trainer is gone", snap.paused_ms, fix)
    if not late:
        return Symptom(
            level,
            f"{what}; every live worker has confirmed",
            snap.paused_ms,
            "read the trainer's log",
        )
    fix = f"read the log of {late[0]}; `rolloutmq fence {late[0]} --yes` continues without it"
    return Symptom(level, f"{what}; it waits for {', '.join(late)}", snap.paused_ms, fix)


def _role(snap: RunView, role: RoleHolder, name: str, start: str) -> Iterator[Symptom]:
    if role.is_alive:
        return
    if role.silent_ms is None:
        yield Symptom("stuck", f"no {name} has been started", _age_ms(snap), f"start one: {start}")
        return
    what = f"the {name} is silent" if role.word == "silent" else f"the {name} has left"
    fix = f"start it again, and it continues where it was: {start}"
    standby = "; a standby takes over by itself" if name == "producer" else ""
    yield Symptom("stuck", what, role.silent_ms, fix + standby)


def _slow_data_set(snap: RunView) -> Iterator[Symptom]:
    producer = snap.producer
    if producer.is_alive and producer.doing:
        level: Level = "stuck" if producer.doing_ms > PATIENCE_MS else "note"
        fix = (
            "the data set of that task is slow: make its rows cheaper to read, or prepare them in "
            "a file; see the producer's log"
        )
        yield Symptom(level, f"the producer {producer.doing}", producer.doing_ms, fix)


def _age_ms(snap: RunView) -> int:
    """Return the age of the run."""
    return max(0, snap.now_ms - int(snap.meta["created_ms"]))


def _workers(snap: RunView) -> Iterator[Symptom]:
    if not snap.live_workers:
        what = (
            f"no worker is alive; {plural(snap.places.get('waiting', 0), 'group')} waiting for one"
        )
        since = min((worker.silent_ms for worker in snap.workers), default=_age_ms(snap))
        fix = "`rolloutmq worker CONFIG`; one that was started joins once its engine is loaded"
        yield Symptom("stuck", what, since, fix)
    for worker in snap.workers:
        if worker.is_barred:
            yield _barred(worker, snap)
        if worker not in snap.live_workers:
            what = f"worker {worker.id} is silent and holds {plural(worker.holds, 'group')}"
            fix = "nothing: other workers generate them once its leases have expired"
            yield Symptom("note", what, worker.silent_ms, fix)


def _failed_audits(snap: RunView) -> Iterator[Symptom]:
    for worker, audit in snap.failed_audits.items():
        fix = (
            f"`rolloutmq workers --groups {worker}` lists the groups that it made; drop those that "
            "are not trained yet, and continue from a checkpoint before the others, or accept them"
        )
        yield Symptom("note", f"worker {worker} failed an audit of {audit}", None, fix)


def _barred(worker: WorkerRecord, snap: RunView) -> Symptom:
    others = [other for other in snap.live_workers if not other.is_barred]
    bad = plural(worker.bad_groups or 0, "group")
    reason = f"it submitted {bad} that the trainer cannot use"
    source = "`rolloutmq dead` gives the reason"
    if worker.id in snap.failed_audits:
        reason, source = "it failed an audit", "see the audit"
    what = f"worker {worker.id} is barred: {reason}{'' if others else '; no other is alive'}"
    fix = f"{source}; fix it, then run `rolloutmq resume --worker {worker.id}`"
    return Symptom("note" if others else "stuck", what, worker.barred_for_ms, fix)


def _weights(snap: RunView) -> Iterator[Symptom]:
    newest = str(snap.weights)
    behind = [worker for worker in snap.live_workers if worker.weights != newest]
    if not behind:
        return
    names = ", ".join(f"{worker.id} has {worker.weights or 'none'}" for worker in behind)
    what = f"the newest weights are {newest}, but {names}; they claim nothing"
    refusal = next((worker.refusal for worker in behind if worker.refusal.startswith(newest)), "")
    what += refusal and f"; {refusal.removeprefix(newest).strip():.300}"
    since = (
        max(0, snap.now_ms - int(snap.control["weights_ms"]))
        if "weights_ms" in snap.control
        else None
    )
    # right after a publication, all workers are still loading
    is_long = since is None or since > PATIENCE_MS or refusal
    level: Level = "stuck" if is_long and len(behind) == len(snap.live_workers) else "note"
    yield Symptom(
        level,
        what,
        since,
        f"check that they can read {snap.control.get('weights_path', '')}, and read their logs",
    )


def _unclaimed(snap: RunView) -> Iterator[Symptom]:
    """Report waiting groups that live workers do not claim.

    The workers serve other tasks or lanes, or hang.
    """
    quiet_ms = last_event_ms(snap)
    waiting = sum(task.account.waiting for task in snap.tasks if not task.is_gone)
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
            "check that they serve these tasks ([worker] tasks, lanes); read their "
            "logs, or restart them"
        )
        yield Symptom(
            "stuck",
            f"{plural(waiting, 'group')} waiting, and no worker claims them: {names}",
            quiet_ms,
            fix,
        )


def _leases(snap: RunView) -> Iterator[Symptom]:
    if snap.overdue:
        what = f"{plural(snap.overdue, 'lease')} expired and not revoked yet"
        yield Symptom(
            "note",
            what,
            None,
            "any process of the run revokes them, or `rolloutmq janitor`",
        )
    live = snap.live_workers
    holders = [worker for worker in live if worker.holds]
    if len(holders) == 1 and len(live) > 1 and snap.leases > 1 and not snap.places.get("waiting"):
        what = (
            f"all {snap.leases} running groups are with {holders[0].id}; "
            f"{plural(len(live) - 1, 'worker')} idle"
        )
        yield Symptom(
            "note", what, None, "a lower concurrency per worker spreads the end of a batch better"
        )


def _memory(snap: RunView) -> Iterator[Symptom]:
    memory = snap.memory
    if not memory.refuses_fresh:
        return
    left = snap.taken - snap.committed
    fix = (
        "the trainer must write a checkpoint and commit"
        if left
        else "set a larger [memory] budget_bytes"
    )
    what = (
        f"the run holds {memory}: "
        f"{'nothing is' if memory.refuses_all else 'no new prompt is'} started"
    )
    yield Symptom("note", f"{what}; {left} taken batches are not committed", None, fix)


def _stopped(snap: RunView) -> Iterator[Symptom]:
    for task in snap.tasks:
        if task.stop_reason:
            what = f"task {task.account.task} is stopped: {task.stop_reason}"
            has_failed = task.progress.get("stopped")
            fix = _fix_of_errors(task) if has_failed else TaskStop("broken").fix(task.account.task)
            yield Symptom("stuck", what, _error_age_ms(task, snap), fix)
        elif task.progress.get("halt") == "enough":
            last = task.progress["halt_step"]
            reason = task.progress.get("halt_reason", "")
            what = f"task {task.account.task} has enough groups up to step {last} ({reason})"
            yield Symptom("note", what, None, "the batch of that step is what is ready")


def _failing(snap: RunView) -> Iterator[Symptom]:
    """Report tasks of which nothing succeeds, before they are stopped."""
    for task in snap.tasks:
        failures = int(task.number("failures_in_row"))
        if failures and not task.stop_reason:
            scope = "every try so far" if task.has_never_succeeded else "in a row"
            level: Level = "stuck" if task.has_never_succeeded else "note"
            what = f"task {task.account.task}: {failures} failed, {scope}: {task.error}"
            yield Symptom(level, what, _error_age_ms(task, snap), _fix_of_errors(task))
        filtered = int(task.number("filtered_in_row"))
        if filtered >= MANY_FILTERED:
            what = f"task {task.account.task}: the last {filtered} groups were all filtered"
            fix = (
                "`rolloutmq tail` shows their rewards: if they are all alike, check the judge, or "
                "change the difficulty of the prompts"
            )
            yield Symptom("note", what, None, fix)


def _error_age_ms(task: TaskView, snap: RunView) -> int | None:
    """Return how long ago the newest error was; None without one."""
    error_ms = int(task.number("error_ms"))
    return max(0, snap.now_ms - error_ms) if error_ms else None


def _fix_of_errors(task: TaskView) -> str:
    return (
        "`rolloutmq dead` has the reasons in full; fix the cause, "
        f"restart the workers, then run `rolloutmq resume --task {task.account.task}`"
    )


def _curriculum(snap: RunView) -> Iterator[Symptom]:
    if reason := snap.control.get("curriculum_error"):
        what = (
            f"task weights have not changed since step {snap.control['curriculum_step']}: {reason}"
        )
        yield Symptom(
            "note",
            what,
            None,
            "fix the function of [plan] curriculum, and restart the producer",
        )


def _gone(snap: RunView) -> Iterator[Symptom]:
    """Report groups that are kept of tasks that the config lacks."""
    for task in snap.tasks:
        account = task.account
        kept = account.waiting + account.completed + account.aborted + account.expired
        if task.is_gone and kept:
            fix = (
                f"`rolloutmq drop --task {account.task} --yes` drops them; with the task in the "
                "config again, they continue"
            )
            what = f"the config lacks task {account.task} now: {plural(kept, 'group')} kept"
            yield Symptom("note", what, None, fix)


def _supply(snap: RunView) -> Iterator[Symptom]:
    quiet_ms = last_event_ms(snap)
    for task in snap.training:
        if task.account.target and task.account.waiting + task.account.running == 0:
            yield _dry(task, quiet_ms)


def _dry(task: TaskView, quiet_ms: int | None) -> Symptom:
    wanted = max(1, task.batch_share)
    account = task.account
    what = f"{account.task}: {task.ready} of {wanted} groups are ready, none waits or runs"
    if task.ready >= wanted:
        return Symptom("note", f"{what}: the trainer is the bottleneck", quiet_ms, "")
    if account.aborted + account.expired:
        what += (
            f"; {account.aborted} aborted and {account.expired} expired groups are in their pools"
        )
        fix = (
            "the producer must reissue them: read its log, and check [strategy] "
            "tail_batch_trigger_size"
        )
    else:
        fix = "the producer enqueues nothing: read its log"
    if quiet_ms is not None and quiet_ms < PATIENCE_MS:
        # right after a take, the producer has not seen the room yet
        return Symptom("note", what, quiet_ms, "")
    return Symptom("stuck", what, quiet_ms, fix)


def _recovery(snap: RunView) -> Iterator[Symptom]:
    if snap.control.get("recovering"):
        what = "a trainer began to open the run and did not finish"
        yield Symptom(
            "stuck", what, snap.trainer.silent_ms, "start the trainer again: it repeats the opening"
        )


def _dead(snap: RunView) -> Iterator[Symptom]:
    if snap.dead:
        fix = "`rolloutmq dead` lists them with their reasons"
        yield Symptom("note", plural(snap.dead, "dead letter"), None, fix)


def describe(symptom: Symptom) -> str:
    """Format a symptom as one line."""
    since = f", for {age(symptom.since_ms)}" if symptom.since_ms is not None else ""
    return f"{symptom.what}{since}"
