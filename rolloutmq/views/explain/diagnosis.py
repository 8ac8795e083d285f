"""Find out what a run waits for, since when, and what to do: the last section of `status`.

`diagnose` needs one view of a run. `inspect` adds, for `doctor` and the browser, what the view does
not have: damage, the judge queue, dead letters, stragglers. Each may be inaccessible (missing
rights), and is then left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from redis.exceptions import ResponseError

from buffer.control.task_status import TaskStop
from buffer.errors import RunError, SchemaVersionError, StoreError, StoreUnavailable
from buffer.failure_text import headline, trace_of
from buffer.groups.dead_letters import by_cause
from buffer.redis.keys import Keys
from buffer.redis.store import Store
from buffer.run.run import Run
from consumer.handle.step_log import TrainedStep, read_steps
from rolloutmq.output import age, plural
from rolloutmq.views.explain.learning import learning
from rolloutmq.views.explain.processes import with_processes
from rolloutmq.views.explain.shares import shares_of
from rolloutmq.views.explain.symptom import (
    PATIENCE_MS,
    Symptom,
    fault,
    note,
    stuck,
    waiting,
    warning,
    worst_first,
)
from rolloutmq.views.explain.who_waited import read_waits
from rolloutmq.views.run_view import RunView, read_run_view

LOADING_MS = 5_000  # a worker that loads weights, or has not reported it yet, needs that long
HANGS, FIRST_MS = 10, 600_000  # mean times of a group, and ms where none has ended
FEW = 20_000  # groups and keys up to which all of a run is checked, within a second or two
FEW_LETTERS = 500  # newest dead letters whose causes are counted
SHOWN = 5  # faults, or causes, that are shown one by one


def diagnose(snap: RunView) -> list[Symptom]:
    """Return what stops the run, or soon will, the worst first.

    During a pause, no process loads weights or starts groups: only the pause itself is reported.
    """
    parts = [_account, _pauses, _roles, _workers, _unclaimed, _memory, _tasks, _shares, _retries]
    parts += [] if snap.paused_by else [_weights, _supply, _hanging]
    if snap.mode == "finish":
        parts = [_account, _shares]
    found = [symptom for part in parts for symptom in part(snap)]
    if snap.mode == "finish":
        more = "to train further, raise `plan.steps` in its config and start it again"
        found.append(
            note("run/finished", "the run is finished: its last step is done", more, snap.paused_ms)
        )
    return worst_first(found)


def last_event_ms(snap: RunView) -> int | None:
    """Return how many milliseconds ago the last event was."""
    return max(0, snap.now_ms - snap.events[-1][0]) if snap.events else None


def _account(snap: RunView) -> Iterator[Symptom]:
    for each in snap.faults:
        yield fault(
            "account/fault",
            each,
            "`rolloutmq fsck` names the groups; keep the data folder as it is",
        )


def _pauses(snap: RunView) -> Iterator[Symptom]:
    what, since_ms = f"paused by the trainer ({snap.mode}), for a weight update", snap.paused_ms
    if snap.paused_by == "operator":
        yield stuck(
            "pause/operator",
            f"paused by an operator ({snap.mode})",
            "`rolloutmq resume`",
            since_ms,
        )
    elif snap.is_orphaned:
        fix = "start the trainer again, and it continues; or end the pause: `rolloutmq resume`"
        yield stuck("pause/orphaned", f"{what}, but that trainer is gone", fix, since_ms)
    elif snap.paused_by:
        late = sorted({worker.id for worker in snap.live_workers} - set(snap.acknowledged))
        said, fix = "; every live worker has confirmed", "read the trainer's log"
        if late:
            said = f"; it waits for {', '.join(late)}"
            continues = f"`rolloutmq fence {late[0]} --yes` continues without it"
            fix = f"read the log of {late[0]}; {continues}"
        yield waiting("pause/trainer", what + said, fix, since_ms)


def _roles(snap: RunView) -> Iterator[Symptom]:
    for role, verb in ((snap.trainer, "train"), (snap.producer, "producer")):
        start = f"`rolloutmq {verb} CONFIG` or `rolloutmq run CONFIG`"
        if role.silent_ms is None:
            what = f"no {role.role} has been started"
            yield stuck(
                f"{role.role}/never_started",
                what,
                f"start one: {start}",
                snap.now_ms - snap.created_ms,
            )
        elif not role.is_alive:
            what = f"the {role.role} {'is silent' if role.word == 'silent' else 'has left'}"
            fix = f"start it again, and it continues where it was: {start}"
            yield stuck(f"{role.role}/gone", what, fix, role.silent_ms)
    producer = snap.producer
    if producer.is_alive and producer.doing:
        fix = "its data set is slow: make its rows cheaper to read, or prepare them in a file"
        yield waiting("producer/busy", f"the producer {producer.doing}", fix, producer.doing_ms)
    if snap.control.get("recovering"):
        fix = "start the trainer again: it repeats the opening"
        what = "a trainer began to open the run and did not finish"
        yield stuck("trainer/opening", what, fix, snap.trainer.silent_ms)


def _workers(snap: RunView) -> Iterator[Symptom]:
    if not snap.live_workers:
        run_ms = snap.now_ms - snap.created_ms
        since = min((worker.silent_ms for worker in snap.workers), default=run_ms)
        what = f"no worker is alive; {plural(snap.unclaimed, 'group')} waiting for one"
        fix = "`rolloutmq worker CONFIG`; one that was started joins once its engine is loaded"
        yield stuck("worker/none", what, fix, since)
    waits, refused_ms = Counter[str](), Counter[str]()
    for worker in snap.live_workers:
        quota = worker.quota.replace("+", " ")
        waits[quota] += worker.quota_waits
        refused_ms[quota] = max(refused_ms[quota], worker.quota_refused_ms)
    for quota, calls in (+waits).items():
        what = f"{plural(calls, 'call')} waiting for the quota of {quota}"
        fix = "no try and no time limit is used up meanwhile; see `limit`"
        if refused_ms[quota]:
            what += ", whose service refuses every call (status 429)"
            fix = f"the workers' logs have its reason, such as a used-up credit; {fix}"
        yield waiting("worker/quota", what, fix, refused_ms[quota] or None)
    for worker in snap.workers:
        if worker.is_barred:
            others = any(not other.is_barred for other in snap.live_workers)
            bad = plural(worker.bad_groups or 0, "group")
            what = f"worker {worker.id} is barred: it submitted {bad} that the trainer cannot use"
            yield (note if others else stuck)(
                "worker/barred",
                what if others else f"{what}; no other is alive",
                "`rolloutmq dead` gives the reason; fix it, then run "
                f"`rolloutmq resume --worker {worker.id}`",
                worker.barred_for_ms,
            )


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
        "worker/old_weights", what, f"check that they can read {path}, and read their logs", since
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
        yield stuck("worker/claims_nothing", what, f"{fix}restart them", quiet_ms)


def _memory(snap: RunView) -> Iterator[Symptom]:
    if snap.server_full:
        is_ready = all(task.ready >= max(1, task.batch_share) for task in snap.training)
        is_freed = snap.taken > snap.committed or bool(snap.taken and is_ready)
        fix = "raise its maxmemory (redis-cli CONFIG SET), or drop groups (`rolloutmq drop`)"
        if is_freed:
            fix = f"the trainer frees some with its next checkpoint; or {fix}"
        is_moving = is_freed or (snap.taken and snap.leases)
        is_moving = is_moving and (last_event_ms(snap) or 0) < PATIENCE_MS
        yield (warning if is_moving else stuck)(
            "memory/server_full", f"{snap.server_full}; nothing new is started", fix
        )
    if snap.memory.refuses_fresh:
        left = snap.taken - snap.committed
        stops = "nothing is" if snap.memory.refuses_all else "no new prompt is"
        yield note(
            "memory/budget",
            f"the run holds {snap.memory}: {stops} started; {left} taken batches are not committed",
            "the trainer must write a checkpoint and commit"
            if left
            else "set a larger [memory] budget_bytes",
        )


def _tasks(snap: RunView) -> Iterator[Symptom]:
    """Report tasks that are stopped, fail, or are not in the config."""
    for task in snap.tasks:
        name, account = task.account.task, task.account
        error_ms = int(task.number("error_ms"))
        since_ms = max(0, snap.now_ms - error_ms) if error_ms else None
        fix_cause, failures = TaskStop("failing").fix(name), int(task.number("failures_in_row"))
        if task.stop_reason:
            fix = fix_cause if task.progress.get("stopped") else TaskStop("broken").fix(name)
            waits = ", and the trainer waits for it" if name in snap.stuck_on else ""
            yield stuck(
                "task/stopped", f"task {name} is stopped{waits}: {task.stop_reason}", fix, since_ms
            )
        elif failures:
            is_new = task.has_never_succeeded
            what = f"{failures} failed, {'every try so far' if is_new else 'in a row'}"
            yield (stuck if is_new else note)(
                "task/failing", f"task {name}: {what}: {task.error}", fix_cause, since_ms
            )
        kept = account.waiting + account.completed + account.aborted + account.expired
        if task.is_gone and kept:
            fix = f"`rolloutmq drop --task {name} --yes` drops them; with the task in the config "
            what = f"the config lacks task {name} now: {plural(kept, 'group')} kept"
            yield note("task/gone", what, f"{fix}again, they continue")


def _shares(snap: RunView) -> Iterator[Symptom]:
    """Report what is missing from the data, or distorts it; not again for a task that stopped."""
    for task in snap.tasks:
        is_reported = task.stop_reason or task.has_never_succeeded
        for share in shares_of(task):
            if share.level != "note" and not (share.name == "failed" and is_reported):
                yield Symptom(
                    share.level,
                    f"share/{share.name}",
                    f"task {task.account.task}: {share}",
                    share.fix,
                )


def _retries(snap: RunView) -> Iterator[Symptom]:
    for (task, cause), number in snap.retries.most_common(SHOWN):
        what = f"task {task}: {plural(number, 'rollout')} failed, and were made again: {cause}"
        yield note("task/retries", what, "`rolloutmq logs worker --level warning` has each of them")


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
            yield note(
                "supply/trainer_bound", f"{what}: the trainer is the bottleneck", since_ms=quiet_ms
            )
        elif is_dry and is_short:
            fix = "the producer enqueues nothing: read its log"
            if account.aborted + account.expired:
                pools = f"{account.aborted} aborted and {account.expired} expired groups"
                what = f"{what}; {pools} are in their pools"
                fix = "the producer must reissue them: read its log, and check [strategy] "
                fix += "on_straggler"
            # right after a take, the producer has not seen the room yet
            is_new = quiet_ms is not None and quiet_ms < PATIENCE_MS
            yield (note if is_new else stuck)("supply/dry", what, fix, quiet_ms)


def _hanging(snap: RunView) -> Iterator[Symptom]:
    """Report running groups for which the trainer waits, and of which none ends."""
    training = snap.report.training
    is_training = snap.taken > max(training.step if training else 0, snap.committed)
    is_short = any(task.ready < max(1, task.batch_share) for task in snap.training)
    quiet_ms = last_event_ms(snap) or 0
    if not snap.leases or not snap.trainer.is_alive or is_training or not is_short:
        return
    groups = sum(task.number("produced_groups") for task in snap.tasks)
    mean_ms = sum(task.number("produced_ms") for task in snap.tasks) / groups if groups else 0
    if quiet_ms > max(PATIENCE_MS, HANGS * mean_ms if groups else FIRST_MS):
        holders = ", ".join(worker.id for worker in snap.live_workers if worker.holds)
        mean = f"; others took {age(mean_ms)}" if groups else ""
        yield stuck(
            "task/hanging",
            f"{plural(snap.leases, 'group')} at {holders or 'no live worker'}: none ends{mean}",
            "an agent, a tool, a judge or the engine may hang: read their logs; [strategy] "
            "group_time_limit_s ends such groups",
            quiet_ms,
        )


def diagnose_run(
    store: Store, name: str, find_folder: Callable[[Run], Path | None] = lambda _: None
) -> tuple[RunView | None, list[Symptom]]:
    """Return the snapshot of a run and its symptoms; no snapshot if the run cannot be opened."""
    try:
        run = Run.open(store, name)
        snap = read_run_view(run)
        folder = find_folder(run)
        found = [*diagnose(snap), *inspect(run, snap, read_steps(folder), folder)]
        return snap, with_processes(snap, found, folder)
    except StoreUnavailable:
        raise
    except (RunError, StoreError, SchemaVersionError) as error:
        fix = error.hint or "inspect it with the version that created it"
        return None, [fault("run/unreadable", error.message, fix)]


def inspect(
    run: Run, snap: RunView, steps: Sequence[TrainedStep], folder: Path | None
) -> list[Symptom]:
    """Return the symptoms of a run that its snapshot does not show.

    `steps`: the trained ones. `folder`: the run's, if it is known here.
    """
    found = [*_damage(run, snap), *learning(folder, steps or snap.last_trained)]
    for part in (_judges, _dead_letters, _stragglers):
        with suppress(StoreError):  # a user who may not read it
            found += part(run, snap)
    with suppress(StoreError):
        if waits := read_waits(run, snap, steps):
            # more workers would wait for the same quota
            is_limited = any(worker.quota_waits for worker in snap.live_workers)
            found.append(note("waits/summary", str(waits), "" if is_limited else waits.advice))
    return found


def _damage(run: Run, snap: RunView) -> Iterator[Symptom]:
    """Report what `fsck` finds: everything in a small run, only cheap checks in a large one."""
    groups = sum(task.account.total for task in snap.tasks)
    databases: Any = run.store.client.info("keyspace")  # DBSIZE is for administrators
    is_small = max(groups, sum(database["keys"] for database in databases.values())) <= FEW
    found = run.account.fsck().damage if is_small else run.account.spot_check()
    texts = [each.text for each in found if each.text not in snap.faults]
    more = [f"{len(texts) - SHOWN} more faults"] if len(texts) > SHOWN else []
    for text in texts[:SHOWN] + more:
        yield fault("account/damage", text, "`rolloutmq fsck` lists all that is wrong")
    if not is_small:
        what = f"{groups} groups: only the ledger and the newest of them were checked"
        yield note("account/partly_checked", what, "`rolloutmq fsck` checks them all")


def count_judges(store: Store, keys: Keys) -> tuple[int, int]:
    """Return how many rollouts wait for judges on this server, and how many of these live."""
    raw: Any = store.client
    try:
        waiting = raw.llen(f"rq:queue:{keys.judge_queue}")
        # a judge that was killed stays in the set, but its own key expires
        workers = raw.smembers(f"rq:workers:{keys.judge_queue}")
        return waiting, sum(raw.exists(worker) for worker in workers)
    except ResponseError:  # a user who may not read them, or a cluster, where they have other nodes
        return 0, 0


def _judges(run: Run, _: RunView) -> Iterator[Symptom]:
    """Report rollouts that wait for judges while none lives, from rq's keys on its server."""
    waiting, alive = count_judges(run.store, run.keys)
    if waiting and not alive:
        what = f"{plural(waiting, 'rollout')} waiting to be judged, and no judge is alive"
        yield stuck("judge/none", what, "`rolloutmq judge CONFIG`")


def _dead_letters(run: Run, snap: RunView) -> Iterator[Symptom]:
    """Report the most frequent causes of the newest dead letters."""
    newest = run.dead_letters.newest() if snap.dead else ()
    left = snap.dead
    for _, letters in by_cause(islice(newest, FEW_LETTERS))[:SHOWN]:
        first, left = letters[0], left - len(letters)
        judged = next((letter.gid for letter in letters if letter.has_responses), None)
        again = f", `rolloutmq rejudge {judged} --pdb` runs its judge again" if judged else ""
        yield note(
            "task/dead_letters",
            f"{plural(len(letters), 'dead letter')}: {headline(first.reason, 200)}",
            f"`rolloutmq show {judged or first.gid}` shows one{again}; fix the cause, then run "
            "`rolloutmq requeue --all-dead --yes`",
            first.age_ms,
            trace_of(first.reason),
        )
    if left > 0:
        yield note(
            "task/dead_letters", plural(left, "more dead letter"), "`rolloutmq dead` lists them"
        )


def _stragglers(run: Run, snap: RunView) -> Iterator[Symptom]:
    """Report groups that run, could serve no later step, and so are waited for."""
    step = snap.taken + 1
    for task in snap.training:
        name, cut = task.account.task, step - task.stale_threshold
        is_ready = task.ready >= max(1, task.batch_share) and task.account.running
        if not (is_ready and run.limits.waits_for_stragglers(name)):
            continue
        gids = run.store.ask("stragglers", "ZRANGEBYSCORE", run.keys.age(name), cut, cut)
        late = [*run.groups.find({"gid": {"$in": [gid.decode() for gid in gids]}})]
        if late:
            oldest = max(late, key=lambda record: record.time_ms or 0)
            yield note(
                "task/stragglers",
                f"step {step} waits for {plural(len(late), 'group')} of task {name} that began "
                f"{task.stale_threshold} steps ago; {oldest.gid} is with {oldest.owner}",
                f"nothing while it samples; a larger `tasks.{name}.max_staleness` waits less; "
                f"`rolloutmq drop {oldest.gid} --revoke {oldest.owner} --yes` ends one that "
                "hangs, [strategy] group_time_limit_s every such one",
                oldest.time_ms,
            )
