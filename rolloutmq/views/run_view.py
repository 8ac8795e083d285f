"""Read a whole run for `status`, `doctor`, metrics and the live views, without payloads.

The account is of one instant (I1); everything else may be a few milliseconds younger.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from buffer.control.control import RoleHolder
from buffer.control.events import Event, TrainerReport, currency_of, parse_event
from buffer.control.retry_counts import Retries
from buffer.control.worker_record import PAUSE_BOUNDS_S, Histogram, WorkerRecord, parse_counts
from buffer.errors import RunDamaged, RunNotFound
from buffer.groups.verdicts import JudgeUse, use_by_task
from buffer.ids import LANES
from buffer.ledger.account import TaskAccount
from buffer.ledger.ledger import LedgerSteps
from buffer.ledger.memory import MemoryUse
from buffer.redis.key_fields import read_counts, require_fields, text_fields
from buffer.redis.key_table import TABLE, TOKEN_ROWS
from buffer.run.run import Run
from buffer.wire.rollout import PolicyVersion
from consumer.handle.step_log import TrainedStep

COUNTERS = tuple(TABLE["progress:<task>"].optional)
BUCKETS = 16  # staleness is counted exactly up to here; older usable groups are counted together
RECENT_MS = 60_000  # an error is shown for this time, and as long as every try fails


@dataclass(frozen=True, slots=True)
class TaskView:
    """One task: its account and ready groups. `batch_share`: its groups in a batch (0: unknown)."""

    account: TaskAccount
    is_eval: bool
    progress: dict[str, str]
    backlog: dict[str, int]
    ready: int
    too_old: int
    staleness: dict[str, int]
    batch_share: int
    stale_threshold: int  # staleness from which its groups are expired
    is_gone: bool = False  # the run's config lacks it now
    judge_use: JudgeUse = field(default_factory=JudgeUse)

    @property
    def stop_reason(self) -> str:
        """Why it starts nothing until `rolloutmq resume --task TASK`; "" while it runs."""
        is_broken = self.progress.get("halt") == "broken"
        reason = self.progress.get("halt_reason", "") if is_broken else ""
        return self.progress.get("stopped", "") or reason

    def trouble(self, now_ms: int) -> str:
        """Return the task's present trouble in one line, or ""."""
        if self.stop_reason:
            return (
                f"stopped until `rolloutmq resume --task {self.account.task}`: {self.stop_reason}"
            )
        is_recent = now_ms - self.number("error_ms") < RECENT_MS
        if self.error and (is_recent or self.number("failures_in_row")):
            return f"{self.number('failed'):.0f} failed: {self.error}"
        return ""

    @property
    def error(self) -> str:
        """The newest error of a failed try; "" if none failed, or the task was continued since."""
        return self.progress.get("error", "")

    @property
    def has_never_succeeded(self) -> bool:
        """Whether tries have failed, and no group was ever completed or filtered."""
        return self.number("failed") > 0 and not self.number("raw_rewards_count")

    @property
    def in_flight(self) -> int:
        """Groups between the cursor and the trainer, which `target - consumed` limits."""
        account = self.account
        return account.waiting + account.running + self.ready

    @property
    def in_flight_limit(self) -> int:
        account = self.account
        if self.is_eval:  # each problem is drawn once
            return self.in_flight + max(0, account.target - account.cursor)
        return max(0, account.target - account.consumed)

    @property
    def failures_by_cause(self) -> dict[str, int]:
        """Failed tries by their cause (`DeadLetter.cause`); after eight causes, "other"."""
        counts = self.progress.items()
        mark = "failed:"
        return {name.removeprefix(mark): int(n) for name, n in counts if name.startswith(mark)}

    def number(self, name: str) -> float:
        """Return a counter of `progress:<task>`; 0 if it was never written."""
        return float(self.progress.get(name, 0))

    @property
    def tokens(self) -> dict[str, int]:
        """The sampled tokens of its groups, by row or `in_groups`; not those that workers hold."""
        rows = {row: int(self.number(f"tokens_{row}")) for row in TOKEN_ROWS}
        return rows | {"in_groups": int(self.number("tokens_sampled")) - sum(rows.values())}

    @property
    def counters(self) -> dict[str, int]:
        """The counters of `progress:<task>` by name; 0 for those that were never written."""
        found = dict.fromkeys(COUNTERS, "0") | self.progress
        whole = re.compile(r"-?\d{1,16}", re.ASCII)
        # not the causes of failures (failed:CAUSE), and not a sum of rewards, which may be whole
        names = [name for name in found if name.isidentifier() and name != "raw_rewards_sum"]
        return {name: int(found[name]) for name in names if whole.fullmatch(found[name])}

    def recent(self, name: str) -> int:
        """Return what a counter counted over the newest groups; `lua/shared/ends.lua`.

        `rolloutmq requeue` and a server that lost data lower counters: 0 then.
        """
        found = re.search(rf"\b{name}=(\d+)", self.progress.get("counts_before", ""))
        return max(0, int(self.number(name)) - int(found[1] if found else 0))

    @property
    def mean_reward(self) -> float | None:
        """The mean score of all completed groups, before any filter; None without scores."""
        scores = self.number("raw_rewards_count")
        return self.number("raw_rewards_sum") / scores if scores else None


@dataclass(frozen=True, slots=True)
class RunView:
    """One reading of a run; times are in ms of the server's clock."""

    run: str
    now_ms: int
    meta: dict[str, str]
    control: dict[str, str]
    taken: int
    committed: int
    freed: int
    tasks: tuple[TaskView, ...]
    faults: tuple[str, ...]
    server_full: str  # words about a server that is full, or ""
    leases: int
    overdue: int
    dead: int
    garbage: int
    workers: tuple[WorkerRecord, ...]
    ended_workers: tuple[WorkerRecord, ...]  # that left or were lost; () beside others
    trainer: RoleHolder
    producer: RoleHolder
    report: TrainerReport
    events: tuple[Event, ...]
    lease_ms: int
    last_step: int  # the number of train steps that the run has in all
    memory: MemoryUse

    @property
    def mode(self) -> str:
        """The mode that workers follow: the stricter of the trainer's and the operator's."""
        return self.control.get("mode", "run")

    @property
    def phase(self) -> str:
        """The mode; of a run without a live process: finished, or stopped."""
        if self.mode == "finish":
            return "finished"
        has_begun = self.trainer.silent_ms is not None
        lives = self.trainer.is_alive or self.producer.is_alive or self.live_workers
        return "stopped" if has_begun and not lives else self.mode

    @property
    def created_ms(self) -> int:
        return int(self.meta["created_ms"])

    @property
    def paused_by(self) -> str | None:
        for who in ("operator", "trainer"):
            if self.control.get(f"{who}_mode", "run") not in ("run", "finish"):
                return who
        return None

    @property
    def is_orphaned(self) -> bool:
        """Whether a trainer that has left or fallen silent still pauses the run."""
        is_paused = self.control.get("trainer_mode", "run") not in ("run", "finish")
        return is_paused and not self.trainer.is_alive

    @property
    def last_trained(self) -> list[TrainedStep]:
        """The newest step that the trainer reported to the server, without its groups, if any."""
        found = self.report.training
        return [TrainedStep(found.step, "", (), dict(found.metrics))] if found else []

    @property
    def paused_ms(self) -> int:
        """Milliseconds since the last change of the mode."""
        return max(0, self.now_ms - int(self.control.get("changed_ms", self.created_ms)))

    @property
    def weights(self) -> PolicyVersion:
        return PolicyVersion.parse(self.control.get("weights", ":0"))

    def reported(self, metric: str) -> float | None:
        """Return a metric of the newest train step; None if the trainer reported none."""
        return self.report.training.metrics.get(metric) if self.report.training else None

    @property
    def currency(self) -> str:
        """Of what the run costs; "" without prices."""
        return currency_of(self.report.training.metrics if self.report.training else {})

    @property
    def live_workers(self) -> list[WorkerRecord]:
        """Workers that a pause waits for."""
        return [each for each in self.workers if each.is_live(self.lease_ms)]

    @property
    def silent_workers(self) -> list[WorkerRecord]:
        return [each for each in self.workers if not each.is_live(self.lease_ms)]

    @property
    def unclaimed(self) -> int:
        """Groups that wait for a worker."""
        return sum(task.account.waiting for task in self.tasks)

    @property
    def judging(self) -> int:
        """Running groups that only wait for their judge, as the live workers report them."""
        # heartbeats are older than the number of leases, and the line shows both
        return min(self.leases, sum(worker.judging for worker in self.live_workers))

    @property
    def pauses(self) -> Histogram:
        """The times of this trainer's pauses, as its heartbeats report them."""
        counts = parse_counts(self.control.get("trainer_pause_buckets", "")) or ()
        total_s = int(self.control.get("trainer_pause_ms", 0)) / 1000
        return Histogram(PAUSE_BOUNDS_S, counts, total_s)

    @property
    def stages(self) -> dict[str, int]:
        """Groups by stage, all tasks together."""
        sums: dict[str, int] = {}
        for task in self.tasks:
            for stage, groups in task.account.stages.items():
                sums[stage] = sums.get(stage, 0) + groups
        return sums

    @property
    def training(self) -> list[TaskView]:
        """Tasks that a train step takes from."""
        return [task for task in self.tasks if not (task.is_eval or task.is_gone)]

    @property
    def stuck_on(self) -> list[str]:
        """The stopped tasks whose restart would let the trainer go on."""
        if self.paused_by == "operator" or self.phase != self.mode:
            return []
        stopped = {task.account.task for task in self.tasks if task.stop_reason}
        return [task for task in self.trainer.waits_for if task in stopped]

    @property
    def troubles(self) -> list[str]:
        """The present troubles: of the server, and one line per task."""
        troubles = {task.account.task: task.trouble(self.now_ms) for task in self.tasks}
        of_tasks = [f"{task}: {trouble}" for task, trouble in troubles.items() if trouble]
        return [*filter(None, [self.server_full]), *of_tasks]

    @property
    def retries(self) -> Retries:
        """Rollouts that failed while their group went on, of all live workers."""
        return sum((worker.retries for worker in self.live_workers), Counter())

    @property
    def tokens_per_s(self) -> float:
        return sum(worker.tokens_per_s for worker in self.live_workers)

    @property
    def acknowledged(self) -> list[str]:
        """Live workers that have carried out the newest control change."""
        epoch = int(self.control.get("epoch", 0))
        return [worker.id for worker in self.live_workers if worker.ack >= epoch]


def read_run_view(run: Run, *, events: int = 8) -> RunView:
    """Read a run, with its newest `events`. Raises StoreUnavailable, RunNotFound, RunDamaged.

    O(tasks + workers + log N), and no payload bytes.
    """
    try:
        return _read_run_view(run, events)
    except RunDamaged as error:
        if run.store.ask("is_there", "EXISTS", run.keys.meta, run.keys.control):
            raise
        hint = "`rolloutmq run CONFIG --regenerate` makes it again from its newest checkpoint"
        raise RunNotFound(f"run {run.name} was deleted from its server", hint=hint) from error


def _read_run_view(run: Run, events: int) -> RunView:
    # `rolloutmq set` may have changed them
    run.refresh_limits()
    audit = run.account.totals()
    eviction = run.store.eviction()
    evicted = [str(eviction)] if eviction.takes_all and eviction.keys else []
    replies = run.store.retrying("snapshot", lambda: _read(run, audit.tasks, events))
    control = _hash(run.keys.control, "control", replies["control"])
    steps = run.keys.ledger("train")
    ledger = read_counts(steps, LedgerSteps._fields, replies["ledger"])
    workers = run.fleet.workers()
    seconds, micros = replies["time"]
    now_ms = seconds * 1000 + micros // 1000
    timeout_ms = run.limits.role_timeout_ms
    return RunView(
        run=run.name,
        now_ms=now_ms,
        meta=_hash(run.keys.meta, "meta", replies["meta"]),
        control=control,
        taken=ledger[0],
        committed=ledger[1],
        freed=ledger[2],
        tasks=tuple(_task_view(run, task, replies, ledger[0]) for task in audit.tasks),
        faults=(*evicted, *audit.faults),
        server_full=eviction.full,
        leases=audit.leases,
        overdue=replies["overdue"],
        dead=replies["dead"],
        garbage=replies["garbage"],
        workers=tuple(workers),
        ended_workers=() if workers else tuple(run.fleet.ended()),
        trainer=RoleHolder.parse("trainer", control, now_ms, timeout_ms),
        producer=RoleHolder.parse("producer", control, now_ms, timeout_ms),
        report=TrainerReport.parse(text_fields(replies["report"])),
        events=tuple(parse_event(entry) for entry in reversed(replies["events"])),
        lease_ms=run.limits.lease_ms,
        last_step=run.limits.steps,
        memory=MemoryUse(audit.bytes.held, run.limits.low_bytes, run.limits.high_bytes),
    )


def _read(run: Run, tasks: list[TaskAccount], events: int) -> dict[str, Any]:
    """Read what no script returns in one pipeline; return the replies by name."""
    keys = run.keys
    control: Any = run.store.client
    names: list[str] = []
    taken = run.ledger.steps()[0]
    seconds, micros = control.time()
    with control.pipeline(transaction=False) as pipe:

        def ask(name: str, *command: str | int) -> None:
            names.append(name)
            pipe.execute_command(*command)

        ask("time", "TIME")
        ask("meta", "HGETALL", keys.meta)
        ask("control", "HGETALL", keys.control)
        ask("report", "HGETALL", keys.report)
        ask("ledger", "HMGET", keys.ledger("train"), "taken", "committed", "freed")
        ask("overdue", "ZCOUNT", keys.leases, "-inf", seconds * 1000 + micros // 1000)
        ask("dead", "ZCARD", keys.dead)
        ask("garbage", "SCARD", keys.garbage)
        ask("events", "XREVRANGE", keys.events, "+", "-", "COUNT", max(1, events))
        ask("judge_use", "HGETALL", keys.judge_use)
        ask("header", "LINDEX", keys.batch("train", taken), 0)
        for task in (account.task for account in tasks):
            ask(f"progress:{task}", "HGETALL", keys.progress(task))
            for lane in LANES:
                ask(f"jobs:{task}:{lane}", "XLEN", keys.jobs(task, lane))
            for label, low, high in _buckets(taken, _threshold(run, task)):
                ask(f"stale:{task}:{label}", "ZCOUNT", keys.pool(task, "completed"), low, high)
        return dict(zip(names, pipe.execute(), strict=True))


def _threshold(run: Run, task: str) -> int:
    # groups of an evaluation never expire: their ages are not shown
    return run.limits.threshold(task) or 1


def _buckets(taken: int, threshold: int) -> list[tuple[str, str | int, str | int]]:
    """Return (label, lowest version, highest version) by staleness in train step taken + 1 (I8)."""
    exact = min(threshold, BUCKETS)
    buckets: list[tuple[str, str | int, str | int]] = [
        (str(s), taken - s, taken - s) for s in range(exact)
    ]
    if threshold > exact:
        buckets.append((f"{exact}+", taken - threshold + 1, taken - exact))
    # groups without a version, or of a step that is still being recorded
    buckets.append(("none", f"({taken}", "+inf"))
    return [*buckets, ("too_old", "-inf", f"({taken + 1 - threshold}")]


def _task_view(run: Run, account: TaskAccount, replies: dict[str, Any], taken: int) -> TaskView:
    name = account.task
    limits = run.limits.tasks[name]
    is_eval = limits.eval_of is not None
    threshold = _threshold(run, name)
    labels = [label for label, _, _ in _buckets(taken, threshold)]
    counts = {label: int(replies[f"stale:{name}:{label}"]) for label in labels}
    too_old = counts.pop("too_old")
    if not counts["none"]:
        del counts["none"]
    progress = _hash(run.keys.progress(name), "progress", replies[f"progress:{name}"])
    # how many groups of the task the newest batch asked for, from its header
    words = dict(w.split("=", 1) for w in (replies["header"] or b"").decode().split() if "=" in w)
    asked = dict(pair.rsplit("=", 1) for pair in words.get("asked", "").split(",") if "=" in pair)
    return TaskView(
        account=account,
        is_eval=is_eval,
        progress=progress,
        backlog={lane: int(replies[f"jobs:{name}:{lane}"]) for lane in LANES},
        # groups of an evaluation never expire
        ready=account.completed if is_eval else sum(counts.values()),
        too_old=0 if is_eval else too_old,
        staleness={} if is_eval else counts,
        batch_share=int(asked.get(name, 0)) or -(-account.consumed // max(taken, 1)),
        stale_threshold=threshold,
        is_gone=limits.is_gone,
        judge_use=use_by_task(replies["judge_use"]).get(name, JudgeUse()),
    )


def _hash(key: str, kind: str, raw: dict[bytes, bytes]) -> dict[str, str]:
    fields = text_fields(raw)
    require_fields(kind, key, fields)
    return fields
