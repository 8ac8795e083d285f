"""Why a batch is not ready, and whether it ever will be: the trainer's side of the state machine.

T is the step that is asked for, M the newest weights, H the staleness from which they are too old
(`RunLimits.horizon_of`). The state follows from what the server contains and is stored nowhere.

                  ┌────────────── continue ◀──── UPDATE_WEIGHT_AND_ABORT: waits
                  ▼                                  ▲
    take(T) ▶ NORMAL ──pause, by trainer or operator─┘
       │        ├── ready, and M serves T + 1 ─────────▶ a batch: train
       │        ├── ready, but a straggler runs ───────▶ waits ([strategy] on_straggler = "wait")
       │        ├── groups are waiting or running ─────▶ waits
       │        ├── its task was stopped ──────────────▶ waits until somebody resumes it, or
       │        │                                        TaskStopped (`TaskStops.are_final`)
       │        ├── all workers refuse M for REFUSAL_S ▶ WeightsRefused: publish others
       │        ├── no producer for producer_timeout_s ▶ ProducerGone
       │        └── none waits or runs, and the producer has had a whole round:
       │              newer weights exist (M < T - 1) ─▶ ExpiredBatch
       │              none do ─────────────────────────▶ NoBatch, with all counters
       ├──▶ EXPIRED_BATCH, T - M - 1 >= H, not ready ──▶ ExpiredBatch: publish the weights of T - 1,
       │                                                 take T again
       ├──▶ EXPIRED_BATCH, T - M >= H, ready ──────────▶ a batch with this status: train, publish
       └──▶ FINISH ────────────────────────────────────▶ Stopped
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from buffer.control.control import ControlState, Mode, RoleHolder, Work
from buffer.control.fleet import Refusals
from buffer.control.task_status import ProduceBatchStatus, TaskStop, batch_status
from buffer.errors import ExpiredBatch, NoBatch, ProducerGone, TaskStopped, WeightsRefused
from buffer.ledger.account import TaskAccount
from buffer.manifest import NotReady
from buffer.redis.retry import OutageClock
from buffer.run.run import Run
from buffer.wire.rollout import PolicyVersion
from buffer.wire.staleness import staleness
from consumer.handle.batch import Stopped

log = logging.getLogger("rolloutmq.consumer")

REFUSAL_S = 60.0  # a shared folder may show new files late, and workers try again

POLL_S = 0.5  # seconds; every submitted group wakes the trainer

TURNS = 3  # three different round numbers enclose a whole round of the producer

_STATUS_REASONS = {
    ProduceBatchStatus.FINISH: "the run is finished: nothing more is produced",
    ProduceBatchStatus.UPDATE_WEIGHT_AND_ABORT: "the run is paused",
    ProduceBatchStatus.EXPIRED_BATCH: "the newest weights are too old for this step: "
    "publish newer ones",
}


def status_of_taken(run: Run, step: int, newest: PolicyVersion) -> ProduceBatchStatus:
    """Return EXPIRED_BATCH if the newest weights are too old for the step after `step`."""
    age = staleness(step + 1, newest.version)
    is_expired = age >= run.limits.horizon_of(step + 1)
    return ProduceBatchStatus.EXPIRED_BATCH if is_expired else ProduceBatchStatus.NORMAL


@dataclass(frozen=True, slots=True)
class WaitReason(NotReady):
    """Adds to `NotReady` how far the missing groups are, and who could generate them."""

    # (waiting, running) groups by missing task
    started: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    workers: int = 0  # live ones that could claim such a group
    refusals: Refusals | None = None  # live workers that cannot load the newest weights
    stopped: Mapping[str, TaskStop] = field(default_factory=dict)  # missing tasks to be resumed
    status: ProduceBatchStatus = ProduceBatchStatus.NORMAL

    def __str__(self) -> str:
        # super() does not work here: a dataclass with slots is a new class, unknown to its methods
        parts = [NotReady.__str__(self)]
        parts += [
            f"of {task}, {waiting} wait and {running} run"
            for task, (waiting, running) in self.started.items()
        ]
        parts += [stop.describe(task) for task, stop in self.stopped.items()]
        parts.append(f"live workers: {self.workers}" if self.workers else "there is no live worker")
        if self.refusals and self.refusals.reasons:
            parts.append(str(self.refusals))
        if self.status in _STATUS_REASONS:
            parts.append(_STATUS_REASONS[self.status])
        return "; ".join(parts)


def explain(run: Run, step: int, answer: NotReady) -> WaitReason:
    """Return why step `step` is not ready. Few round trips; changes nothing."""
    state = run.control.state()
    refusals = run.fleet.refusals(state.weights)
    accounts = _short_accounts(run, answer)
    stops = {each.task: run.task_stops.of(each.task) for each in accounts}
    return WaitReason(
        **asdict(answer),
        started={each.task: (each.waiting, each.running) for each in accounts},
        workers=refusals.live,
        refusals=refusals,
        stopped={task: stop for task, stop in stops.items() if stop.is_stopped},
        status=batch_status(state, step, run.limits),
    )


def _short_accounts(run: Run, answer: NotReady) -> list[TaskAccount]:
    short = {task for task, (ready, wanted) in answer.missing.items() if ready < wanted}
    return [account for account in run.account.totals().tasks if account.task in short]


class BatchOutlook:
    """Decides during one wait, until `close`, whether the batch of `step` can still become ready.

    `trains`: False for an evaluation, whose groups never become too old. `producer_timeout_s`: how
    long to wait while no producer is alive; None: forever. `work`: is told which stopped tasks it
    waits for. `stops_are_final`: it raises TaskStopped instead.
    """

    def __init__(
        self,
        run: Run,
        step: int,
        producer_timeout_s: float | None,
        *,
        work: Work,
        trains: bool = True,
        stops_are_final: bool = False,
    ) -> None:
        self._run = run
        self._work = work
        self._stops_are_final = stops_are_final
        self._stopped: list[str] = []
        self._step = step
        self._trains = trains
        self._timeout_s = producer_timeout_s
        self._refused_since_s: float | None = None
        self._refused: PolicyVersion | None = None  # weights whose refusal is logged
        self._clock = OutageClock()
        self._waited_s = 0.0
        self._next_check_s = time.monotonic() + POLL_S
        self._accounts: list[TaskAccount] = []
        self._producer = ""
        self._turns: set[int] = set()
        self._has_warned = False

    def obtainable(self, counts: Mapping[str, int], answer: NotReady) -> dict[str, int]:
        """Return how many groups to wait for: `counts`, or what an ended task has ready.

        Raises TaskStopped for a stopped task if that is final (I11), NoBatch if all have ended.
        """
        wanted = dict(counts)
        stopped = []
        for task, (ready, _) in answer.missing.items():
            if ready >= counts[task]:
                continue
            stop = self._run.task_stops.of(task)
            if stop.is_enough_for(self._step):
                wanted[task] = ready
            if stop.is_stopped:
                if self._stops_are_final:
                    hint = f"{stop.fix(task)}, or start `rolloutmq run` again"
                    raise TaskStopped(stop.describe(task), hint=hint)
                if task not in self._stopped:
                    log.error("the trainer waits: %s; %s", stop.describe(task), stop.fix(task))
                stopped.append(task)
            elif not any(wanted.values()):
                raise NoBatch(
                    f"step {self._step} cannot be served: no group is ready, and {stop.reason} "
                    f"ended task {task}",
                    hint="let should_continue_fn return True while no group is completed",
                )
        if stopped or self._stopped:  # another wait of this process may have told of its own
            self._work.wait_for(stopped)
        self._stopped = stopped
        return wanted

    def close(self) -> None:
        """End the wait."""
        if self._stopped:
            self._work.wait_for(())

    def check(self, answer: NotReady) -> None:
        """Raise if waiting is useless, as the module describes: Stopped if the run is finished."""
        self._waited_s = self._clock.poll()
        if answer.recovering or time.monotonic() < self._next_check_s:
            return
        self._next_check_s = time.monotonic() + POLL_S
        state = self._run.control.state()
        if state.mode is Mode.FINISH:
            raise Stopped
        if not state.lanes:
            return
        holder = self._run.control.holder("producer")
        self._raise_if_gone(holder)
        self._raise_if_refused(state)
        if self._trains and not answer.awaits_stragglers:
            status = batch_status(state, self._step, self._run.limits)
            if status is ProduceBatchStatus.EXPIRED_BATCH:
                limit, setting = self._run.limits.limit_of(self._step)
                reason = f"{setting} lets one version start groups for {limit} steps only"
                raise self._expired(state, reason, answer)
            self._raise_if_exhausted(state, answer, holder)

    def _raise_if_gone(self, holder: RoleHolder) -> None:
        if holder.is_alive:
            self._has_warned = False
            return
        missed_s = self._waited_s
        if holder.silent_ms is not None:
            # the producer of a run that was stopped overnight has been silent for hours: count only
            # the time for which this trainer has waited
            missed_s = min(missed_s, holder.silent_ms / 1000)
        if self._timeout_s is not None and missed_s >= self._timeout_s:
            raise ProducerGone(
                f"step {self._step} waits for groups, and {holder}",
                hint="see its log, then run `rolloutmq producer CONFIG`",
            )
        if not self._has_warned and missed_s >= 1.0:
            log.warning("step %d waits for groups, and %s", self._step, holder)
            self._has_warned = True

    def _raise_if_refused(self, state: ControlState) -> None:
        """Log refusals of the newest weights once; raise if no worker loads them for REFUSAL_S."""
        found = self._run.fleet.refusals(state.weights)
        hint = (
            "publish a complete folder of the model that the workers were started with, at a path "
            f"that they can read ({state.weights_path})"
        )
        if found.reasons and self._refused != state.weights:
            self._refused = state.weights
            log.error("%s; %s", found, hint)
        if not found.reasons or not found.are_all:
            self._refused_since_s = None
            return
        now = time.monotonic()
        self._refused_since_s = self._refused_since_s or now
        if now - self._refused_since_s >= REFUSAL_S:
            raise WeightsRefused(
                f"no worker can generate groups: {found}",
                hint=f"{hint}; `publish` writes and announces one",
                command_hint=hint,
            )

    def _raise_if_exhausted(
        self, state: ControlState, answer: NotReady, holder: RoleHolder
    ) -> None:
        accounts = _short_accounts(self._run, answer)
        started = sum(task.waiting + task.running for task in accounts)
        if (
            started
            or self._stopped  # until it is resumed, the producer starts none
            or accounts != self._accounts
            or holder.nonce != self._producer  # whose rounds are counted
            or answer.checkpoint_now
            or self._run.memory.use().refuses_fresh
        ):
            self._accounts = accounts
            self._producer = holder.nonce
            self._turns = {holder.turns}
            return
        self._turns.add(holder.turns)
        if len(self._turns) < TURNS:
            return
        if state.weights.version < self._step - 1:
            reason = "all groups that they may generate are generated"
            raise self._expired(state, reason, answer)
        rows = []
        for task in accounts:
            numbers = {"target": task.target, "consumed": task.consumed, "cursor": task.cursor}
            counts = ", ".join(f"{name} {n}" for name, n in (numbers | task.stages).items() if n)
            rows.append(f"{task.task}: {counts}")
        raise NoBatch(
            f"step {self._step} cannot be served: {answer}, none waits or runs, the producer "
            f"starts none, and there are no weights newer than {state.weights} to continue with; "
            f"{'; '.join(rows)}",
            hint="take at most the groups of [plan] batch_size and steps, shared by task weights; "
            "see `rolloutmq doctor`",
        )

    def _expired(self, state: ControlState, reason: str, answer: NotReady) -> ExpiredBatch:
        return ExpiredBatch(
            f"step {self._step} cannot be served by the weights {state.weights}: {reason} "
            f"({answer})",
            hint=f"publish the weights of step {self._step - 1}, then take step {self._step} again",
        )
