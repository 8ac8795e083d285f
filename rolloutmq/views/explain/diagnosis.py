"""Find out what a run waits for, since when, and what to do, from one view of it.

`status` ends with it; `doctor` and the browser add what `inspection` reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

from rich.text import Text

from buffer.control.task_status import TaskStop
from rolloutmq.output import age, plural
from rolloutmq.views.explain.shares import shares_of
from rolloutmq.views.run_view import RunView, TaskView

Level = Literal["note", "warning", "error", "stuck", "fault"]

PATIENCE_MS = 30_000  # a shorter pause of the trainer, or wait, is normal
LOADING_MS = 5_000  # a worker that loads weights, or has not reported it yet, needs that long
MOST_BIAS = 0.1  # the mean trained length may be this much below the mean started one

_MARKS = {
    "ok": ("[ok  ]", "green"),
    "warning": ("[warn]", "yellow"),
    "error": ("[BAD ]", "bold red"),
    "note": ("[note]", "dim"),
    "stuck": ("[WAIT]", "yellow"),
    "fault": ("[BAD ]", "bold red"),
}


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

    def text(self) -> Text:
        since = f", for {age(self.since_ms)}" if self.since_ms is not None else ""
        trace = "".join(f"\n       {line}" for line in self.trace.splitlines())
        what = Text.assemble(f"{self.what}{since}", (trace, "red"))
        return marked(self.level, what, self.fix)


def marked(level: str, what: str | Text, fix: str = "") -> Text:
    return Text.assemble(_MARKS[level], " ", what, f"\n       {fix}" if fix else "")


fault, stuck, warning, note = (
    partial(Symptom, level) for level in ("fault", "stuck", "warning", "note")
)


def _waiting(what: str, fix: str, since_ms: int | None) -> Symptom:
    """Return a wait, which is normal at first."""
    return (stuck if (since_ms or 0) > PATIENCE_MS else note)(what, fix, since_ms)


def diagnose(snap: RunView) -> list[Symptom]:
    """Return what stops the run, or soon will, the worst first.

    During a pause, no process loads weights or starts groups: only the pause itself is reported.
    """
    parts = [_account, _pauses, _roles, _workers, _unclaimed, _leases, _memory, _tasks, _shares]
    parts += [] if snap.paused_by else [_weights, _supply]
    if snap.mode == "finish":
        parts = [_account, _end, _shares]
    return worst_first(symptom for part in parts for symptom in part(snap))


def worst_first(symptoms: Iterable[Symptom]) -> list[Symptom]:
    """Sort symptoms by level: fault, stuck, error, warning, note."""
    order: tuple[Level, ...] = ("fault", "stuck", "error", "warning", "note")
    return sorted(symptoms, key=lambda symptom: order.index(symptom.level))


def last_event_ms(snap: RunView) -> int | None:
    """Return how many milliseconds ago the last event was."""
    return max(0, snap.now_ms - snap.events[-1][0]) if snap.events else None


def _end(snap: RunView) -> Iterator[Symptom]:
    more = "to train further, raise `plan.steps` in its config and start it again"
    yield note("the run is finished: its last step is done", more, snap.paused_ms)


def _account(snap: RunView) -> Iterator[Symptom]:
    for each in snap.faults:
        yield fault(each, "`rolloutmq fsck` names the groups; keep the data folder as it is")


def _pauses(snap: RunView) -> Iterator[Symptom]:
    what, since_ms = f"paused by the trainer ({snap.mode}), for a weight update", snap.paused_ms
    if snap.paused_by == "operator":
        yield stuck(f"paused by an operator ({snap.mode})", "`rolloutmq resume`", since_ms)
    elif snap.is_orphaned:
        fix = "start the trainer again, and it continues; or end the pause: `rolloutmq resume`"
        yield stuck(f"{what}, but that trainer is gone", fix, since_ms)
    elif snap.paused_by:
        late = sorted({worker.id for worker in snap.live_workers} - set(snap.acknowledged))
        said, fix = "; every live worker has confirmed", "read the trainer's log"
        if late:
            said = f"; it waits for {', '.join(late)}"
            continues = f"`rolloutmq fence {late[0]} --yes` continues without it"
            fix = f"read the log of {late[0]}; {continues}"
        yield _waiting(what + said, fix, since_ms)


def _roles(snap: RunView) -> Iterator[Symptom]:
    for role, verb in ((snap.trainer, "train"), (snap.producer, "producer")):
        start = f"`rolloutmq {verb} CONFIG` or `rolloutmq run CONFIG`"
        if role.silent_ms is None:
            what = f"no {role.role} has been started"
            yield stuck(what, f"start one: {start}", snap.now_ms - snap.created_ms)
        elif not role.is_alive:
            what = f"the {role.role} {'is silent' if role.word == 'silent' else 'has left'}"
            fix = f"start it again, and it continues where it was: {start}"
            yield stuck(what, fix, role.silent_ms)
    producer = snap.producer
    if producer.is_alive and producer.doing:
        fix = "its data set is slow: make its rows cheaper to read, or prepare them in a file"
        yield _waiting(f"the producer {producer.doing}", fix, producer.doing_ms)
    if snap.control.get("recovering"):
        fix = "start the trainer again: it repeats the opening"
        what = "a trainer began to open the run and did not finish"
        yield stuck(what, fix, snap.trainer.silent_ms)


def _workers(snap: RunView) -> Iterator[Symptom]:
    if not snap.live_workers:
        run_ms = snap.now_ms - snap.created_ms
        since = min((worker.silent_ms for worker in snap.workers), default=run_ms)
        what = f"no worker is alive; {plural(snap.unclaimed, 'group')} waiting for one"
        fix = "`rolloutmq worker CONFIG`; one that was started joins once its engine is loaded"
        yield stuck(what, fix, since)
    for worker in snap.workers:
        if worker.is_barred:
            others = any(not other.is_barred for other in snap.live_workers)
            bad = plural(worker.bad_groups or 0, "group")
            what = f"worker {worker.id} is barred: it submitted {bad} that the trainer cannot use"
            yield (note if others else stuck)(
                what if others else f"{what}; no other is alive",
                "`rolloutmq dead` gives the reason; fix it, then run "
                f"`rolloutmq resume --worker {worker.id}`",
                worker.barred_for_ms,
            )
        if worker in snap.silent_workers:
            what = f"worker {worker.id} is silent and holds {plural(worker.holds, 'group')}"
            fix = "nothing: other workers generate them once its leases have expired"
            yield note(what, fix, worker.silent_ms)


def _weights(snap: RunView) -> Iterator[Symptom]:
    newest = str(snap.weights)
    behind = [worker for worker in snap.live_workers if worker.weights != newest]
    refusal = next((worker.refusal for worker in behind if worker.refusal.startswith(newest)), "")
    published_ms = snap.control.get("weights_ms")
    since = max(0, snap.now_ms - int(published_ms)) if published_ms else None
    if not behind or (since is not None and since <= LOADING_MS and not refusal):
        return
    names = ", ".join(f"{worker.id} has {worker.weights or 'none'}" for worker in behind)
    what = f"the newest weights are {newest}, but {names}; they claim nothing"
    what += refusal and f"; {refusal.removeprefix(newest).strip():.300}"
    is_long = since is None or since > PATIENCE_MS or refusal
    path = snap.control.get("weights_path", "")
    yield (stuck if is_long and len(behind) == len(snap.live_workers) else note)(
        what, f"check that they can read {path}, and read their logs", since
    )


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
        fix = "check that they serve these tasks ([worker] tasks, lanes); read their logs, or "
        yield stuck(what, f"{fix}restart them", quiet_ms)


def _leases(snap: RunView) -> Iterator[Symptom]:
    if snap.overdue:
        what = f"{plural(snap.overdue, 'lease')} expired and not revoked yet"
        yield note(what, "any process of the run revokes them, or `rolloutmq janitor`")
    live = snap.live_workers
    holders = [worker for worker in live if worker.holds]
    if len(holders) == 1 and len(live) > 1 and snap.leases > 1 and not snap.stages.get("waiting"):
        idle = plural(len(live) - 1, "worker")
        what = f"all {snap.leases} running groups are with {holders[0].id}; {idle} idle"
        yield note(what, "a lower concurrency per worker spreads the end of a batch better")


def _memory(snap: RunView) -> Iterator[Symptom]:
    if snap.server_full:
        fix = "let the trainer write a checkpoint and commit, drop groups, or raise maxmemory"
        what = f"{snap.server_full}; nothing new is started"
        yield (warning if snap.leases else stuck)(what, f"{fix} (redis-cli CONFIG SET)")
    if snap.memory.refuses_fresh:
        left = snap.taken - snap.committed
        stops = "nothing is" if snap.memory.refuses_all else "no new prompt is"
        yield note(
            f"the run holds {snap.memory}: {stops} started; {left} taken batches are not committed",
            "the trainer must write a checkpoint and commit"
            if left
            else "set a larger [memory] budget_bytes",
        )


def _tasks(snap: RunView) -> Iterator[Symptom]:
    """Report tasks that are stopped, fail, learn to be short, or are not in the config."""
    for task in snap.tasks:
        name, account = task.account.task, task.account
        error_ms = int(task.number("error_ms"))
        since_ms = max(0, snap.now_ms - error_ms) if error_ms else None
        fix_cause, failures = TaskStop("failing").fix(name), int(task.number("failures_in_row"))
        if task.stop_reason:
            fix = fix_cause if task.progress.get("stopped") else TaskStop("broken").fix(name)
            waits = ", and the trainer waits for it" if name in snap.stuck_on else ""
            yield stuck(f"task {name} is stopped{waits}: {task.stop_reason}", fix, since_ms)
        elif failures:
            is_new = task.has_never_succeeded
            what = f"{failures} failed, {'every try so far' if is_new else 'in a row'}"
            yield (stuck if is_new else note)(
                f"task {name}: {what}: {task.error}", fix_cause, since_ms
            )
        if task.progress.get("halt") == "enough" and not task.stop_reason:
            reason = f"step {task.progress['halt_step']} ({task.progress.get('halt_reason', '')})"
            what = f"task {name} has enough groups up to {reason}"
            yield note(what, "the batch of that step is what is ready")
        yield from _length_bias(name, snap)
        kept = account.waiting + account.completed + account.aborted + account.expired
        if task.is_gone and kept:
            fix = f"`rolloutmq drop --task {name} --yes` drops them; with the task in the config "
            what = f"the config lacks task {name} now: {plural(kept, 'group')} kept"
            yield note(what, f"{fix}again, they continue")


def _shares(snap: RunView) -> Iterator[Symptom]:
    """Report what is missing from the data, or distorts it; not again for a task that stopped."""
    for task in snap.tasks:
        is_reported = task.stop_reason or task.has_never_succeeded
        for share in shares_of(task):
            if share.level != "note" and not (share.name == "failed" and is_reported):
                yield Symptom(share.level, f"task {task.account.task}: {share}", share.fix)


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


def _length_bias(task: str, snap: RunView) -> Iterator[Symptom]:
    """Report a bias but for that of equal rewards, which have no gradient by their nature."""
    metrics = snap.report.training.metrics if snap.report.training else {}

    def ratio(name: str) -> float:
        return metrics.get(f"length_bias/{name}/{task}", 1.0)

    mean = ratio("mean") / max(1e-9, ratio("no_advantage"))
    if mean < 1 - MOST_BIAS:
        worst = min(LOSSES, key=ratio)
        loss, fix = LOSSES[worst] if ratio(worst) < 1 else ("nothing that is counted", "")
        yield warning(
            f"task {task} learns to be short: responses with a gradient have {mean:.0%} of the "
            f"mean length of those that were started, and {ratio('tail'):.0%} of the longest "
            f"twentieth are left; most of it was lost to {loss}",
            fix.replace("TASK", task),
        )


def _supply(snap: RunView) -> Iterator[Symptom]:
    """Report training tasks of which nothing waits or runs."""
    quiet_ms = last_event_ms(snap)
    for task in snap.training:
        account, wanted = task.account, max(1, task.batch_share)
        # a task with a small share has nothing to start for some steps
        is_short = account.target > account.consumed + task.ready
        is_dry = account.target and account.waiting + account.running == 0
        what = f"{account.task}: {task.ready} of {wanted} groups are ready, none waits or runs"
        if is_dry and task.ready >= wanted:
            yield note(f"{what}: the trainer is the bottleneck", since_ms=quiet_ms)
        elif is_dry and is_short:
            yield _dry(task, what, quiet_ms)


def _dry(task: TaskView, what: str, quiet_ms: int | None) -> Symptom:
    fix, account = "the producer enqueues nothing: read its log", task.account
    if account.aborted + account.expired:
        pools = f"{account.aborted} aborted and {account.expired} expired groups"
        what = f"{what}; {pools} are in their pools"
        fix = "the producer must reissue them: read its log, and check [strategy] on_straggler"
    if quiet_ms is not None and quiet_ms < PATIENCE_MS:
        # right after a take, the producer has not seen the room yet
        return note(what, since_ms=quiet_ms)
    return stuck(what, fix, quiet_ms)
