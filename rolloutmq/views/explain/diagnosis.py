"""Find out what a run waits for, since when, and what to do, from one view of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

from buffer.control.control import RoleHolder
from buffer.control.task_status import TaskStop
from buffer.control.worker_record import WorkerRecord
from rolloutmq.output import age, plural
from rolloutmq.views.explain.shares import shares_of
from rolloutmq.views.run_view import RunView, TaskView

Level = Literal["note", "warning", "error", "stuck", "fault"]

PATIENCE_MS = 30_000  # a shorter pause of the trainer, or wait, is normal
LOADING_MS = 5_000  # a worker that loads weights, or has not reported it yet, needs that long
MOST_BIAS = 0.1  # the mean trained length may be this much below the mean started one


@dataclass(frozen=True, slots=True)
class Symptom:
    """One finding: what was found, what to do, and for how many ms it lasts (None: unknown).

    `trace`: the traceback of the user's code, if that raised.
    """

    level: Level
    what: str
    fix: str = ""
    since_ms: int | None = None
    trace: str = ""


_fault = partial(Symptom, "fault")
_stuck = partial(Symptom, "stuck")
_note = partial(Symptom, "note")


def _waiting(what: str, fix: str, since_ms: int) -> Symptom:
    """Return a wait, which is normal at first."""
    return Symptom("stuck" if since_ms > PATIENCE_MS else "note", what, fix, since_ms)


def diagnose(snap: RunView) -> list[Symptom]:
    """Return what stops the run, or soon will, the worst first.

    During a pause, no process loads weights or starts groups: only the pause itself is reported.
    """
    if snap.mode == "finish":
        more = "to train further, raise `plan.steps` in its config and start it again"
        over = _note("the run is finished: its last step is done", more, snap.paused_ms)
        return worst_first([*_account(snap), over, *_shares(snap)])
    parts = [_account, _pauses, _roles, _slow_data_set, _workers, _unclaimed,
             _leases, _memory, _tasks, _shares, _recovery]  # fmt: skip
    parts += [] if snap.paused_by else [_weights, _supply]
    return worst_first(symptom for part in parts for symptom in part(snap))


def worst_first(symptoms: Iterable[Symptom]) -> list[Symptom]:
    """Sort symptoms by level: fault, stuck, error, warning, note."""
    order: tuple[Level, ...] = ("fault", "stuck", "error", "warning", "note")
    return sorted(symptoms, key=lambda symptom: order.index(symptom.level))


def last_event_ms(snap: RunView) -> int | None:
    """Return how many milliseconds ago the last event was."""
    return max(0, snap.now_ms - snap.events[-1][0]) if snap.events else None


def describe(symptom: Symptom) -> str:
    since = f", for {age(symptom.since_ms)}" if symptom.since_ms is not None else ""
    return f"{symptom.what}{since}"


def _account(snap: RunView) -> Iterator[Symptom]:
    for fault in snap.faults:
        yield _fault(fault, "`rolloutmq fsck` names the groups; keep the data folder as it is")


def _pauses(snap: RunView) -> Iterator[Symptom]:
    if snap.paused_by == "operator":
        what = f"paused by an operator ({snap.mode})"
        yield _stuck(what, "`rolloutmq resume`", snap.paused_ms)
    elif snap.paused_by == "trainer":
        yield _trainer_pause(snap)


def _trainer_pause(snap: RunView) -> Symptom:
    late = sorted({worker.id for worker in snap.live_workers} - set(snap.acknowledged))
    what = f"paused by the trainer ({snap.mode}), for a weight update"
    if snap.is_orphaned:
        fix = "start the trainer again, and it continues by itself; or end the pause: "
        what = f"{what}, but that trainer is gone"
        return _stuck(what, f"{fix}`rolloutmq resume`", snap.paused_ms)
    if not late:
        what = f"{what}; every live worker has confirmed"
        return _waiting(what, "read the trainer's log", snap.paused_ms)
    fix = f"read the log of {late[0]}; `rolloutmq fence {late[0]} --yes` continues without it"
    return _waiting(f"{what}; it waits for {', '.join(late)}", fix, snap.paused_ms)


def _roles(snap: RunView) -> Iterator[Symptom]:
    for role, verb in ((snap.trainer, "train"), (snap.producer, "producer")):
        if not role.is_alive:
            yield _absent(snap, role, verb)


def _absent(snap: RunView, role: RoleHolder, verb: str) -> Symptom:
    name = role.role
    start = f"`rolloutmq {verb} CONFIG` or `rolloutmq run CONFIG`"
    if role.silent_ms is None:
        return _stuck(f"no {name} has been started", f"start one: {start}", _age_ms(snap))
    what = f"the {name} is silent" if role.word == "silent" else f"the {name} has left"
    fix = f"start it again, and it continues where it was: {start}"
    return _stuck(what, fix, role.silent_ms)


def _slow_data_set(snap: RunView) -> Iterator[Symptom]:
    producer = snap.producer
    if producer.is_alive and producer.doing:
        fix = (
            "the data set of that task is slow: make its rows cheaper to read, or prepare them in "
            "a file; see the producer's log"
        )
        yield _waiting(f"the producer {producer.doing}", fix, producer.doing_ms)


def _age_ms(snap: RunView) -> int:
    return max(0, snap.now_ms - int(snap.meta["created_ms"]))


def _workers(snap: RunView) -> Iterator[Symptom]:
    if not snap.live_workers:
        waiting = plural(snap.unclaimed, "group")
        since = min((worker.silent_ms for worker in snap.workers), default=_age_ms(snap))
        fix = "`rolloutmq worker CONFIG`; one that was started joins once its engine is loaded"
        yield _stuck(f"no worker is alive; {waiting} waiting for one", fix, since)
    for worker in snap.workers:
        if worker.is_barred:
            yield _barred(worker, snap)
        if worker in snap.silent_workers:
            what = f"worker {worker.id} is silent and holds {plural(worker.holds, 'group')}"
            fix = "nothing: other workers generate them once its leases have expired"
            yield _note(what, fix, worker.silent_ms)


def _barred(worker: WorkerRecord, snap: RunView) -> Symptom:
    others = [other for other in snap.live_workers if not other.is_barred]
    bad = plural(worker.bad_groups or 0, "group")
    reason = f"it submitted {bad} that the trainer cannot use"
    source = "`rolloutmq dead` gives the reason"
    what = f"worker {worker.id} is barred: {reason}{'' if others else '; no other is alive'}"
    fix = f"{source}; fix it, then run `rolloutmq resume --worker {worker.id}`"
    return Symptom("note" if others else "stuck", what, fix, worker.barred_for_ms)


def _weights(snap: RunView) -> Iterator[Symptom]:
    newest = str(snap.weights)
    behind = [worker for worker in snap.live_workers if worker.weights != newest]
    if not behind:
        return
    names = ", ".join(f"{worker.id} has {worker.weights or 'none'}" for worker in behind)
    what = f"the newest weights are {newest}, but {names}; they claim nothing"
    refusal = next((worker.refusal for worker in behind if worker.refusal.startswith(newest)), "")
    what += refusal and f"; {refusal.removeprefix(newest).strip():.300}"
    published_ms = snap.control.get("weights_ms")
    since = max(0, snap.now_ms - int(published_ms)) if published_ms else None
    if since is not None and since <= LOADING_MS and not refusal:
        return
    is_long = since is None or since > PATIENCE_MS or refusal
    level: Level = "stuck" if is_long and len(behind) == len(snap.live_workers) else "note"
    path = snap.control.get("weights_path", "")
    yield Symptom(level, what, f"check that they can read {path}, and read their logs", since)


def _unclaimed(snap: RunView) -> Iterator[Symptom]:
    """Report waiting groups whose live workers hang, or serve other tasks or lanes."""
    quiet_ms = last_event_ms(snap)
    claimable = [task for task in snap.tasks if not task.is_gone and not task.stop_reason]
    waiting = sum(task.account.waiting for task in claimable)
    can_claim = [worker for worker in snap.live_workers if worker.weights == str(snap.weights)]
    is_quiet = (quiet_ms or 0) > PATIENCE_MS and not snap.leases
    if waiting and can_claim and is_quiet and snap.mode == "run":
        names = ", ".join(f"{worker.id} ({worker.state})" for worker in can_claim)
        what = f"{plural(waiting, 'group')} waiting, and no worker claims them: {names}"
        fix = (
            "check that they serve these tasks ([worker] tasks, lanes); read their logs, or "
            "restart them"
        )
        yield _stuck(what, fix, quiet_ms)


def _leases(snap: RunView) -> Iterator[Symptom]:
    if snap.overdue:
        what = f"{plural(snap.overdue, 'lease')} expired and not revoked yet"
        yield _note(what, "any process of the run revokes them, or `rolloutmq janitor`")
    live = snap.live_workers
    holders = [worker for worker in live if worker.holds]
    if len(holders) == 1 and len(live) > 1 and snap.leases > 1 and not snap.stages.get("waiting"):
        idle = plural(len(live) - 1, "worker")
        what = f"all {snap.leases} running groups are with {holders[0].id}; {idle} idle"
        yield _note(what, "a lower concurrency per worker spreads the end of a batch better")


def _memory(snap: RunView) -> Iterator[Symptom]:
    if snap.server_full:
        fix = (
            "let the trainer write a checkpoint and commit, drop groups, or raise maxmemory "
            "(redis-cli CONFIG SET)"
        )
        what = f"{snap.server_full}; nothing new is started"
        yield Symptom("warning" if snap.leases else "stuck", what, fix)
    memory = snap.memory
    if not memory.refuses_fresh:
        return
    left = snap.taken - snap.committed
    larger = "set a larger [memory] budget_bytes"
    fix = "the trainer must write a checkpoint and commit" if left else larger
    stops = "nothing is" if memory.refuses_all else "no new prompt is"
    what = f"the run holds {memory}: {stops} started"
    yield _note(f"{what}; {left} taken batches are not committed", fix)


def _tasks(snap: RunView) -> Iterator[Symptom]:
    for task in snap.tasks:
        yield from _task(task, snap)


def _task(task: TaskView, snap: RunView) -> Iterator[Symptom]:
    """Report a task that is stopped, fails, learns to be short, or is not in the config."""
    name, account = task.account.task, task.account
    error_ms = int(task.number("error_ms"))
    since_ms = max(0, snap.now_ms - error_ms) if error_ms else None
    fix_cause = TaskStop("failing").fix(name)
    if task.stop_reason:
        fix = fix_cause if task.progress.get("stopped") else TaskStop("broken").fix(name)
        waits = ", and the trainer waits for it" if name in snap.stuck_on else ""
        yield _stuck(f"task {name} is stopped{waits}: {task.stop_reason}", fix, since_ms)
    elif task.progress.get("halt") == "enough":
        reason = task.progress.get("halt_reason", "")
        what = f"task {name} has enough groups up to step {task.progress['halt_step']} ({reason})"
        yield _note(what, "the batch of that step is what is ready")
    if (failures := int(task.number("failures_in_row"))) and not task.stop_reason:
        scope = "every try so far" if task.has_never_succeeded else "in a row"
        level: Level = "stuck" if task.has_never_succeeded else "note"
        yield Symptom(
            level, f"task {name}: {failures} failed, {scope}: {task.error}", fix_cause, since_ms
        )
    metrics = snap.report.training.metrics if snap.report.training else {}
    if bias := _length_bias(name, metrics):
        yield bias
    kept = account.waiting + account.completed + account.aborted + account.expired
    if task.is_gone and kept:
        fix = (
            f"`rolloutmq drop --task {name} --yes` drops them; with the task in the config again, "
            "they continue"
        )
        yield _note(f"the config lacks task {name} now: {plural(kept, 'group')} kept", fix)


def _shares(snap: RunView) -> Iterator[Symptom]:
    """Report what is missing from the data, or distorts it; not again for a task that stopped."""
    for task in snap.tasks:
        is_reported = task.stop_reason or task.has_never_succeeded
        for share in shares_of(task):
            if share.level != "note" and not (share.name == "failed" and is_reported):
                yield Symptom(share.level, f"task {task.account.task}: {share}", share.fix)


def _supply(snap: RunView) -> Iterator[Symptom]:
    quiet_ms = last_event_ms(snap)
    for task in snap.training:
        account, is_served = task.account, task.ready >= max(1, task.batch_share)
        # a task with a small share has nothing to start for some steps
        is_short = account.target > account.consumed + task.ready
        if account.target and account.waiting + account.running == 0 and (is_served or is_short):
            yield _dry(task, quiet_ms)


LOSSES = {
    "expired": (
        "groups that expired while they ran",
        "`rolloutmq set tasks.TASK.on_straggler=wait`, or a larger `tasks.TASK.max_staleness`",
    ),
    "failed": ("failed tries", "`rolloutmq dead` has the causes; a time limit ends long ones"),
    "interrupted": ("weight updates", "set [policy] pause_mode = keep, or enable_partial_rollout"),
    "filtered": ("is_valid_sample_fn", "filter by what does not grow with the length"),
    "dropped": ("groups that were abandoned", "raise [gateway] session_ttl_s"),
    "pool": ("groups that expired in their pool", "set [policy] order = staleness"),
    "overlong": ("max_sequence_tokens", "raise it, or lower the max_tokens of the task"),
    "truncated": ("mask_truncated", "set mask_truncated = false, or raise max_tokens"),
    "stale": ("max_token_staleness", "raise it"),
}
"""What takes long responses away (buffer/control/length_counts.py), and what can be done."""


def _length_bias(task: str, metrics: Mapping[str, float]) -> Symptom | None:
    """Report a bias but for that of equal rewards, which have no gradient by their nature."""

    def ratio(name: str) -> float:
        return metrics.get(f"length_bias/{name}/{task}", 1.0)

    mean = ratio("mean") / max(1e-9, ratio("no_advantage"))
    if mean >= 1 - MOST_BIAS:
        return None
    worst = min(LOSSES, key=ratio)
    loss, fix = LOSSES[worst] if ratio(worst) < 1 else ("nothing that is counted", "")
    what = (
        f"task {task} learns to be short: responses with a gradient have {mean:.0%} of the mean "
        f"length of those that were started, and {ratio('tail'):.0%} of the longest twentieth are "
        f"left; most of it was lost to {loss}"
    )
    return Symptom("warning", what, fix.replace("TASK", task))


def _dry(task: TaskView, quiet_ms: int | None) -> Symptom:
    wanted = max(1, task.batch_share)
    account = task.account
    what = f"{account.task}: {task.ready} of {wanted} groups are ready, none waits or runs"
    if task.ready >= wanted:
        return _note(f"{what}: the trainer is the bottleneck", since_ms=quiet_ms)
    fix = "the producer enqueues nothing: read its log"
    if account.aborted + account.expired:
        pools = f"{account.aborted} aborted and {account.expired} expired groups"
        what = f"{what}; {pools} are in their pools"
        fix = "the producer must reissue them: read its log, and check [strategy] on_straggler"
    if quiet_ms is not None and quiet_ms < PATIENCE_MS:
        # right after a take, the producer has not seen the room yet
        return _note(what, since_ms=quiet_ms)
    return _stuck(what, fix, quiet_ms)


def _recovery(snap: RunView) -> Iterator[Symptom]:
    if snap.control.get("recovering"):
        what = "a trainer began to open the run and did not finish"
        fix = "start the trainer again: it repeats the opening"
        yield _stuck(what, fix, snap.trainer.silent_ms)
