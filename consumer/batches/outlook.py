"""Whether a batch that is not ready ever will be: the trainer's half of the disaggregated state
machine.

T is the step that is asked for, M the newest weights, H the staleness at which they are too old
(`RunLimits.horizon`). A state is nowhere stored: it follows from what the server holds, so that
producer and trainer cannot disagree.

                  ┌────────────── continue ◀──── UPDATE_WEIGHT_AND_ABORT: waits
                  ▼                                  ▲
    take(T) ▶ NORMAL ──pause, by trainer or operator─┘
       │        ├── ready, and M serves T + 1 ─────────▶ a batch: train
       │        ├── not ready, and somebody works ─────▶ waits
       │        ├── its task was stopped ──────────────▶ TaskStopped (consumer/batches/wait.py)
       │        ├── no producer for so many seconds ───▶ ProducerGone (a standby that takes over ends the wait)
       │        └── nobody works, and the producer has looked again:
       │              newer weights exist (M < T - 1) ─▶ ExpiredBatch
       │              none do ─────────────────────────▶ NoBatch, with all counters
       ├──▶ EXPIRED_BATCH, T - M - 1 >= H, not ready ──▶ ExpiredBatch: publish the weights of T - 1, take T again
       ├──▶ EXPIRED_BATCH, T - M >= H, ready ──────────▶ a batch that says so: train, then publish
       └──▶ FINISH ────────────────────────────────────▶ Stopped
"""

from __future__ import annotations

import logging
import time

from buffer.batches.account import TaskAccount
from buffer.control.control import ControlState, Mode
from buffer.control.role_holder import RoleHolder
from buffer.control.task_status import ProduceBatchStatus, batch_status
from buffer.errors import ExpiredBatch, NoBatch, ProducerGone
from buffer.model.manifest import NotReady
from buffer.model.staleness import staleness
from buffer.run import Run
from buffer.store.retry import OutageClock

log = logging.getLogger("rolloutmq.consumer")

LOOK_S = 0.5
"""Before the first look, and between two: a trainer is woken for every group that comes in."""

BEATS = 3
"""A producer beats once a round: between the first look and the last of so many beats there was a
whole round.
"""


def status_of_taken(run: Run, step: int) -> ProduceBatchStatus:
    """EXPIRED_BATCH if nothing that the newest weights make can serve the step after `step`: train,
    then publish.
    """
    expired = staleness(step + 1, run.control.state().weights.version) >= run.limits.horizon
    return ProduceBatchStatus.EXPIRED_BATCH if expired else ProduceBatchStatus.NORMAL


class BatchOutlook:
    """One wait for the batch of `step`. `trains` is False for an evaluation, whose groups never
    become too old.

    `producer_timeout_s`: how long a run without a producer is waited with; None: for ever.
    """

    def __init__(
        self, run: Run, step: int, producer_timeout_s: float | None, *, trains: bool = True
    ) -> None:
        self._run = run
        self._step = step
        self._trains = trains
        self._timeout_s = producer_timeout_s
        self._clock = OutageClock()
        self._waited_s = 0.0
        self._look_at_s = time.monotonic() + LOOK_S
        self._standing: list[TaskAccount] = []
        self._beats: set[int] = set()
        self._has_warned = False

    def check(self, answer: NotReady) -> bool:
        """Raise what makes waiting on useless (see the module). Whether the run goes on: False once
        it is finished.
        """
        self._waited_s = self._clock.look()
        if answer.recovering or time.monotonic() < self._look_at_s:
            return True
        self._look_at_s = time.monotonic() + LOOK_S
        short = [task for task, (ready, wanted) in answer.missing.items() if ready < wanted]
        state = self._run.control.state()
        if state.mode is Mode.FINISH:
            return False
        if not state.lanes:
            return True
        holder = self._run.control.holder("producer")
        self._raise_if_gone(holder)
        if self._trains:
            self._raise_if_expired(state, answer)
            self._raise_if_dry(state, answer, short, holder)
        return True

    def _raise_if_gone(self, holder: RoleHolder) -> None:
        """Who starts again within the time, or a standby, is not missed; but it is told at once."""
        if holder.is_alive:
            self._has_warned = False
            return
        # a run that was stopped overnight had no producer for hours: what counts is how long it is
        # missed
        missed_s = (
            self._waited_s
            if holder.silent_ms is None
            else min(self._waited_s, holder.silent_ms / 1000)
        )
        if self._timeout_s is not None and missed_s >= self._timeout_s:
            hint = "see its log, then `rolloutmq producer CONFIG`; with --standby, another one takes over by itself"
            raise ProducerGone(
                f"step {self._step} waits for groups, and {holder}; no standby took over", hint=hint
            )
        if not self._has_warned and missed_s >= 1.0:
            log.warning(
                "step %d waits for groups, and %s; a standby may take over", self._step, holder
            )
            self._has_warned = True

    def _raise_if_expired(self, state: ControlState, answer: NotReady) -> None:
        if batch_status(state, self._step, self._run.limits) is ProduceBatchStatus.EXPIRED_BATCH:
            raise self._expired(
                state, f"their groups are {self._run.limits.horizon} steps too old for it", answer
            )

    def _raise_if_dry(
        self, state: ControlState, answer: NotReady, short: list[str], holder: RoleHolder
    ) -> None:
        standing = [task for task in self._run.account.totals().tasks if task.task in short]
        at_work = sum(task.waiting + task.running for task in standing)
        if (
            at_work
            or standing != self._standing
            or answer.checkpoint_now
            or self._run.memory.use().refuses_fresh
        ):
            self._standing = standing
            self._beats = {holder.seen_ms}
            return
        self._beats.add(holder.seen_ms)
        if len(self._beats) < BEATS:
            return
        if state.weights.version < self._step - 1:
            raise self._expired(state, "all groups that they may make are made", answer)
        raise NoBatch(
            f"step {self._step} cannot be served: {answer}, nobody works on any, the producer starts none, and there "
            f"are no weights newer than {state.weights} to go on with; {_counters(standing)}",
            hint="ask for no more than [plan] batch_size and steps say, shared by task weights; see `rolloutmq doctor`",
        )

    def _expired(self, state: ControlState, why: str, answer: NotReady) -> ExpiredBatch:
        return ExpiredBatch(
            f"step {self._step} cannot be served by the weights {state.weights}: {why} ({answer})",
            hint=f"publish the weights of step {self._step - 1}, then take step {self._step} again",
        )


def _counters(tasks: list[TaskAccount]) -> str:
    """All that is counted of each task; zeros are left out."""
    rows = []
    for task in tasks:
        numbers = {
            "target": task.target,
            "consumed": task.consumed,
            "cursor": task.cursor,
            **task.places,
        }
        rows.append(
            f"{task.task}: "
            + ", ".join(f"{name} {count}" for name, count in numbers.items() if count)
        )
    return "; ".join(rows)
