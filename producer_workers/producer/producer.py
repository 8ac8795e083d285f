"""The producer of a run: it decides which groups are generated next (I3, I7).

One is active at a time. All its state is in Redis, so it may be killed at any moment.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from buffer.control.control import ControlState, Work
from buffer.control.progress import Leftovers, TaskProgress
from buffer.control.roles import HeldRole
from buffer.control.task_status import ProduceBatchStatus, TaskStop, batch_status
from buffer.errors import ConfigError, PayloadMissing, Skip, StoreFull, TaskStopped
from buffer.groups.skips import skip_letter
from buffer.ids import new_nonce
from buffer.ledger.memory import MemoryUse
from buffer.redis.bounds import BYTES_PER_VALUE
from buffer.redis.retry import LogOnce
from buffer.run.continuation import record_origin
from buffer.run.origin import Origin
from buffer.run.run import Run
from buffer.wire.rollout import RolloutState
from producer_workers.producer.sampler import Sampler, TooLong
from producer_workers.producer.strategy import (
    ProduceContext,
    ProducePlan,
    ProduceStrategy,
    contexts,
)

log = logging.getLogger("rolloutmq.producer")

# A round runs at least this often, since leases run out and wake-ups can be lost; more often with
# short leases: half a lease between two sweeps would count as an outage, in which no lease ends.
ROUND_S = 1.0

NO_STOP = TaskStop()


class Prompt(NamedTuple):
    """A draw: `letter` is why it is skipped; one that is too large has no `rollouts`, either."""

    gid: str
    rollouts: int = 0
    payload: bytes = b""
    letter: str = ""


DRAW_S = 1.0  # groups of a slow data set start after this time, with the prompts drawn until then


class TaskProducer:
    """Starts the groups of one task: interrupted and expired ones, then new prompts (I3, I12).

    It is the reference's SamplerWithReplayBuffer. `slice_size`: most new prompts in one enqueue.
    """

    def __init__(self, run: Run, sampler: Sampler, *, slice_size: int, work: Work) -> None:
        self._run = run
        self._sampler = sampler
        self._slice_size = slice_size
        self._work = work
        self.task = sampler.task
        self._cursor: int | None = None
        self._ahead: dict[int, Prompt] = {}

    def start(
        self, nonce: str, plan: ProducePlan, context: ProduceContext, memory: MemoryUse
    ) -> int:
        """Start as many groups as the plan's target has room for, and return how many.

        `nonce`: of the producer. Raises Fenced, StoreFull, and DatasetError for an unusable row.
        """
        started = 0
        for status, at_least in plan.pools:
            if getattr(context.leftovers, status) >= at_least:
                started += self._run.jobs.reissue(
                    nonce,
                    self.task,
                    status,
                    plan.target,
                    at_least=at_least,
                    tail_step=plan.tail_step if status == "expired" else None,
                )
        room = min(context.room(plan.target, started), self._slice_size)
        if room <= 0:
            return started
        if memory.refuses(self._run.limits.tasks[self.task].lane):
            # the script decides; but it would refuse most of what is drawn and stored for it
            room = 1
        cursor = context.progress.cursor
        if context.progress.reentered:
            cursor = self._run.jobs.next_draw(nonce, self.task)
        prompts = self._prompts(cursor, room)
        if payloads := {each.gid: each.payload for each in prompts if each.payload}:
            self._run.payloads.write_prompts(payloads)
        samples = [prompt.rollouts for prompt in prompts]
        letters = {draw: each.letter for draw, each in enumerate(prompts, cursor) if each.letter}
        try:
            done = self._run.jobs.enqueue(
                nonce, new_nonce(), self.task, cursor, samples, plan.target, letters
            )
        except PayloadMissing as error:
            log.warning("prompts expired before they were enqueued; drawing them again: %s", error)
            return started
        self._cursor = done.cursor
        self._ahead = {draw: prompt for draw, prompt in self._ahead.items() if draw >= done.cursor}
        passed = prompts[: done.cursor - cursor]
        if too_large := sum(not each.payload and not each.letter for each in passed):
            facts = {"task": self.task}
            log.warning("passed over %d prompts that are too large", too_large, extra=facts)
        return started + done.count

    def _prompts(self, cursor: int, room: int) -> list[Prompt]:
        """Return the next prompts: `room` of them, or those drawn within DRAW_S."""
        until_s = time.monotonic() + DRAW_S
        prompts = [self._prompt(cursor)]
        while len(prompts) < room and time.monotonic() < until_s:
            prompts.append(self._prompt(cursor + len(prompts)))
        return prompts

    def _prompt(self, draw: int) -> Prompt:
        """Return a prompt that is ready to be stored."""
        if draw not in self._ahead:
            gid = self._sampler.gid(draw)
            with self._work.on(f"draws prompt {draw} of task {self.task}"):
                try:
                    states: list[RolloutState] | TooLong | Skip = self._sampler.draw(draw)
                except Skip as error:
                    states = error
            if isinstance(states, TooLong):
                self._ahead[draw] = Prompt(gid)
            elif isinstance(states, Skip):
                place = self._sampler.place(draw)._asdict()
                self._ahead[draw] = Prompt(gid, letter=skip_letter(gid, states.message, place))
            else:
                payload = self._sampler.encode(draw, states)
                self._ahead[draw] = Prompt(gid, len(states), payload)
                if not self._run.payloads.fits(payload):
                    log.warning(
                        "task %s: row %d is skipped: its prompt has %d bytes, and at most %d can "
                        "be stored",
                        self.task,
                        self._sampler.place(draw).row,
                        len(payload),
                        BYTES_PER_VALUE,
                    )
                    self._ahead[draw] = Prompt(gid)
        return self._ahead[draw]

    def prepare(self) -> bool:
        """Draw some prompts early, for new weights; return whether more are missing."""
        if self._cursor is None or len(self._ahead) >= self._slice_size:
            return False
        wanted = range(self._cursor, self._cursor + self._slice_size)
        missing = (draw for draw in wanted if draw not in self._ahead)
        try:
            until_s = time.monotonic() + DRAW_S
            # prompts drawn ahead between two polls of the control state
            for draw in islice(missing, 16):
                self._prompt(draw)
                if time.monotonic() > until_s:
                    break
        except ConfigError as error:
            # raised again when this prompt is due, if it ever is
            log.debug("not drawn ahead: %s", error)
            return False
        return len(self._ahead) < self._slice_size


@dataclass(frozen=True, slots=True)
class ProducedBatch:
    """The outcome of `produce_batch`. `made`: counts of the call. `leftovers`: the pools' sizes."""

    status: ProduceBatchStatus
    made: Mapping[str, TaskProgress]
    leftovers: Mapping[str, Leftovers]
    seconds: float


class Producer:
    """The producer of a run (the reference's AgentLoopManager), active while it is `opened`.

    `samplers`, `strategies`: by task. `slice_size`: new prompts in one enqueue.
    """

    def __init__(
        self,
        run: Run,
        samplers: Mapping[str, Sampler],
        strategies: Mapping[str, ProduceStrategy],
        *,
        slice_size: int = 64,
        origin: Origin | None = None,
    ) -> None:
        self._run = run
        self._origin = origin
        self._strategies = strategies
        work = Work()
        self._samplers = {
            task: TaskProducer(run, sampler, slice_size=slice_size, work=work)
            for task, sampler in samplers.items()
        }
        self._memory = MemoryUse(0, 0, 0)
        self._refusal = LogOnce(log, "no new groups for now")
        self._stops: dict[str, TaskStop] = {}
        self._halts: dict[str, TaskStop] = {}
        self._sweep_at = 0.0
        self.role = HeldRole(run.control, "producer", work=work)
        self.nonce = self.role.nonce

    @contextmanager
    def opened(self, *, take_over: bool = False) -> Iterator[None]:
        """Be the producer of the run during the block; a thread sends heartbeats.

        Raises RoleHeld while another producer is alive, LostRun, ConfigError for another `origin`.
        """
        self._run.control.open_producer(self.nonce, run_nonce=self._run.nonce, take_over=take_over)
        if self._origin:
            run = self._run
            for change in record_origin(run.store, run.keys, self._origin, self.nonce):
                log.warning("continued with another config: %s", change)
        log.info("producing", extra={"run": self._run.name, "tasks": list(self._samplers)})
        limits = self._run.limits
        self.role.renew_in_background(lambda: limits.heartbeat_ms / 1000, lambda: None)
        try:
            yield
        except BaseException:
            self.role.ended.set()  # the role times out, as if the process had died
            raise
        self.role.close()

    def produce_loop(self, stop: threading.Event, *, take_over: bool = False) -> None:
        """Produce until `stop` or the end of the run. Raises RoleHeld, Fenced, LostRun."""
        self._run.store.patience = lambda: not stop.is_set()
        with self.opened(take_over=take_over):
            while not stop.is_set():
                state = self.role.renew()
                if batch_status(state, 0, self._run.limits) is ProduceBatchStatus.FINISH:
                    break
                self._round_or_wait(state)

    def produce_batch(
        self, step: int, *, stop: threading.Event | None = None, deadline_s: float | None = None
    ) -> ProducedBatch:
        """Produce until the batch of train step `step` is ready for the trainer to take.

        Returns early if the run is paused or finished or its weights are too old; the status says
        which. Waits for a stopped task to be resumed, as a trainer does (`TaskStops.are_final`).
        Raises TimeoutError after `deadline_s` or `stop`, TaskStopped, Fenced.
        """
        began = time.monotonic()
        before = self._run.read_progress()
        while True:
            status = batch_status(self.role.renew(), step, self._run.limits)
            shares = self._run.limits.mix().shares(step)
            halts = {task: self._halts.get(task, NO_STOP) for task in shares}
            # tasks that have enough for it are left out
            wanted = {task: n for task, n in shares.items() if not halts[task].is_enough_for(step)}
            if status is not ProduceBatchStatus.NORMAL or self._run.buffer.is_ready(wanted):
                break
            is_late = deadline_s is not None and time.monotonic() - began > deadline_s
            if is_late or (stop and stop.is_set()):
                sizes = self._run.buffer.count_statuses()
                parts = [str(sizes), *(stop.describe(task) for task, stop in self._stops.items())]
                raise TimeoutError(f"the batch of step {step} is not ready: {'; '.join(parts)}")
            if self._run.task_stops.are_final:
                for task, share in shares.items():
                    stopped = self._stops.get(task)
                    if stopped and not self._run.buffer.is_ready({task: share}):
                        raise TaskStopped(stopped.describe(task), hint=stopped.fix(task))
            self._round_or_wait(self._run.control.state())
        now = self._run.read_progress()
        return ProducedBatch(status, now.since(before), now.leftovers, time.monotonic() - began)

    # -- rounds --------------------------------------------------------------

    def _round_or_wait(self, state: ControlState) -> None:
        """Produce one round; if it started nothing, draw ahead, then wait for a wake-up.

        Every result wakes it up, so the sweep runs only once per `round_s`, after the round.
        """
        round_s = min(ROUND_S, self._run.limits.lease_ms / 4000)
        started = self.round(state, sweep=False)
        # in a pause for new weights there is time: what comes after it must be fast
        if time.monotonic() >= self._sweep_at + (0.0 if state.lanes else round_s):
            self._sweep_at = time.monotonic() + round_s
            self._run.janitor.sweep()
        if not started and not any([sampler.prepare() for sampler in self._samplers.values()]):
            self._run.store.wait(self._run.keys.wake_up("producer"), round_s)

    def round(self, state: ControlState, *, sweep: bool = True) -> int:
        """Produce one round, and return how many groups it started."""
        if sweep:
            self._run.janitor.sweep()
        if not state.lanes:
            return 0
        before = self._memory
        _, self._memory = self._run.poll()
        if self._memory.refuses_fresh != before.refuses_fresh:
            change = "no new prompts for now" if self._memory.refuses_fresh else "new prompts again"
            log.warning("%s: the run holds %s", change, self._memory)
        for task, limits in self._run.limits.tasks.items() if self._origin else ():
            if task not in self._samplers and not limits.is_gone:
                reason = "the producer's config lacks it: restart the producer with the new config"
                self._publish(task, TaskStop("broken", 0, reason))
        progress = self._run.read_progress(self._samplers)
        seen = contexts(self._run.limits, state, progress)
        try:
            started = sum(map(self._produce, seen.values()))
        except StoreFull as error:
            # the next round sweeps, which frees memory, and tries again
            self._refusal.report(str(error))
            return 0
        self._refusal.report("")
        return started

    def _produce(self, context: ProduceContext) -> int:
        """Start the groups that a task wants. A task that cannot continue stops alone (I11)."""
        task = context.task
        lane = self._run.limits.tasks[task].lane
        if lane not in context.state.lanes or self._is_stopped(context):
            return 0
        try:
            plan = self._strategies[task].plan(context)
            if plan.is_enough:
                self._publish(task, TaskStop("enough", context.train_step, "should_continue_fn"))
                return 0
            self._publish(task, NO_STOP)
            return self._samplers[task].start(self.nonce, plan, context, self._memory)
        except ConfigError as error:
            self._publish(task, TaskStop("broken", 0, str(error)))
            self._is_stopped(context)
            return 0

    def _is_stopped(self, context: ProduceContext) -> bool:
        """Return whether a task is stopped, and log when it becomes so."""
        # the scripts would refuse anyway
        task = context.task
        stop = TaskStop("failing" if context.progress.stopped else "", 0, context.progress.stopped)
        # until an operator continues the task; a new producer tries again
        if self._halts.get(task, NO_STOP).kind == "broken":
            stop = self._run.task_stops.of(task)
        if stop.is_stopped:
            if task not in self._stops:
                log.error("task %s is stopped: %s; %s", task, stop.reason, stop.fix(task))
            self._stops[task] = stop
            return True
        self._stops.pop(task, None)
        return False

    def _publish(self, task: str, halt: TaskStop) -> None:
        if self._halts.get(task) != halt:
            self._run.task_stops.publish(self.nonce, task, halt)
            self._halts[task] = halt
