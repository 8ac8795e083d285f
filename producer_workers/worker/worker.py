"""The rollout worker: claims jobs for one engine, generates and judges groups, submits them.

Redis decides: a claim is refused in a pause or without the newest weights (I10), and a result whose
lease was lost (I2).

    mode              the worker                                          its receipt means
    run               samples with the old weights until newer ones are   it has those weights,
                      fetched, loads them, samples, claims; fetches       and has fetched those
                      those that are announced                            that are announced
    keep              freezes the engine                                  nothing is sampled
    abort             ends what the engine samples; groups go to the      it holds no group
                      aborted pool, with the tokens of members that
                      ended, and of all if partial rollout is on; those
                      interrupted too often are finished
    drain, finish     claims nothing, finishes what it holds              it holds no group
    abort, drain with no open lane: an engine that sleeps does so before  and no device memory
                      the receipt (colocated runs)

Its parts, each of which posts events to the worker's inbox and never calls it:

    part           owns                                if it ends unexpectedly
    Worker         every decision, on the event loop   leases run out, others take the groups
    a step         the engine's state, one claim       the worker leaves
    HeldGroups     the asyncio task of each group      the group fails, and is released
    Submitter      finished results until submitted    the groups fail, and are released
    Heartbeat      leases and receipts, on a thread    the worker leaves: replaced, or run gone
    ControlClient  the control line                    heartbeats do the same until it is back
    engine         tokens and device memory            groups release themselves; a new engine
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import socket
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from buffer.control.control import ControlState, Mode
from buffer.control.host_watch import HostWatch
from buffer.control.worker_record import HeartbeatReport, WorkerState
from buffer.errors import GroupChanged
from buffer.groups.job_queue import Serves
from buffer.ids import new_nonce
from buffer.job import Job
from buffer.run.run import Run
from buffer.wire.rollout import PolicyVersion
from producer_workers import call_turns
from producer_workers.agent_loops.agent_loop import Vacancy
from producer_workers.config.producing import WorkerSection
from producer_workers.engines.base import Engine, EngineDeadError
from producer_workers.judges.watched_judges import reported
from producer_workers.user_code.process_function import REPLACED
from producer_workers.user_code.user_function import contain_exits
from producer_workers.worker.claims import Claims, WakeUp
from producer_workers.worker.control_client import ControlClient, ControlView
from producer_workers.worker.group_runner import GroupRunner
from producer_workers.worker.heartbeat import Heartbeat, LoopWatch, TokenRate
from producer_workers.worker.held_groups import HeldGroups, Protection
from producer_workers.worker.inbox import (
    Event,
    HeartbeatAnswered,
    HintReceived,
    Inbox,
    PartEnded,
    ReceiptAnswered,
    Signal,
    StepFinished,
)
from producer_workers.worker.shared_engine import SharedEngine
from producer_workers.worker.task_runner import TaskRunner
from producer_workers.worker.weight_updates import WeightUpdates

log = logging.getLogger("rolloutmq.worker")

IDLE_S = 1.0  # an idle worker takes a step at least this often
HAND_BACK_S = 5.0  # how long a leaving worker waits for aborted groups before it hands them back


class Worker:
    """One worker of a run. Start the engine, then await `run()`, which ends after `stop()`.

    `tasks`: how it treats those that it serves. `weights_url`: see `WeightsReceiver`. `facts`: what
    it registers.
    """

    def __init__(
        self,
        run: Run,
        engine: Engine,
        tasks: Mapping[str, TaskRunner],
        limits: WorkerSection | None = None,
        *,
        worker_id: str,
        weights_url: str | None = None,
    ) -> None:
        self.id = worker_id
        self._run = run
        self._nonce = new_nonce()
        self._limits = limits or WorkerSection()
        self._inbox = Inbox()
        self._control = ControlView()
        untruncated = [name for name, task in tasks.items() if task.is_untruncated]
        self._engine = SharedEngine(engine, self._inbox, untruncated)
        self._weights = WeightUpdates(run, engine, self._inbox, weights_url)
        self._groups = HeldGroups(self._inbox, self._engine)
        self._protection = Protection(run.limits)
        serves = Serves(frozenset(tasks), frozenset(self._limits.lanes))
        loops = [task.agent_loop for task in tasks.values()]
        for loop in loops:
            loop.claim_soon = partial(self._inbox.post, Signal.JOBS_MAY_WAIT)
        self._claims = Claims(run, worker_id, self._nonce, self._limits.concurrency, serves, loops)
        self._wake_up = WakeUp(run, self._inbox)
        self._runner = GroupRunner(
            run, self._engine, self._groups, tasks, worker_id, self._claims.failures
        )
        self._judges = {task.judges for task in tasks.values()}
        self._token_rate = TokenRate()
        self._loop_watch = LoopWatch()
        self._host = HostWatch(Path.cwd())
        self.facts = {"host": socket.gethostname(), "pid": str(os.getpid()), "engine": engine.name}
        is_stuck = self._loop_watch.is_stuck
        self._heartbeat = Heartbeat(
            *(run, worker_id, self._nonce, self.facts, self._report, self._inbox, is_stuck),
            self._engine.token_counts.total,
        )
        self._client = ControlClient(run, worker_id, self._nonce, self._control, self._inbox)

        self._step: asyncio.Task[None] | None = None
        self._is_step_due = True
        self._is_stopping = False
        self._failure: BaseException | None = None

    def stop(self) -> None:
        """Finish the groups that are held, claim no others, leave. Called on the event loop."""
        self._is_stopping = True
        self._inbox.post(Signal.STOP_ASKED)

    async def run(self) -> None:
        """Work until `stop` or the end of the run; keep results while the server is unreachable.

        Raises ConfigError, EngineDeadError, GroupChanged, LostRun, RunNotFound, and Fenced if
        another process registered this id.
        """
        contain_exits(asyncio.get_running_loop())
        self.facts |= await self._runner.open()
        self._loop_watch.start()
        self._inbox.open()
        state = await asyncio.to_thread(self._heartbeat.register)
        self._control.receive_answer(state, 0)
        self._heartbeat.start()
        async with self._client.connected():
            try:
                await self._work()
            finally:
                await self._leave()

    async def _work(self) -> None:
        control = self._control
        while not (self._is_stopping or (control.mode is Mode.FINISH and not self._groups)):
            if self._step is None:
                self._is_step_due = False
                self._step = asyncio.create_task(self._take_step())
            aborting = control.mode is Mode.ABORT and not control.is_carried_out
            await self._handle_events(
                # time between two aborts of the same groups
                0.05 if aborting or self._groups.are_ending else IDLE_S,
                lambda: self._step is not None or not self._is_step_due,
            )
            if self._failure:
                raise self._failure

    # -- events --------------------------------------------------------------

    async def _handle_events(self, timeout_s: float, is_wanted: Callable[[], object]) -> None:
        """Handle events while `is_wanted()`, for `timeout_s` seconds at most."""
        until_s = asyncio.get_running_loop().time() + timeout_s
        while is_wanted() and (event := await self._inbox.read(until_s)):
            self._is_step_due |= self._handle(event)

    def _handle(self, event: Event) -> bool:
        """Handle an event. Return whether the next step is due because of it."""
        match event:
            case Signal.CONTROL_LINE_BROKEN:
                self._heartbeat.send_now()
                return False
            case Signal.REQUEST_FINISHED:
                # while a wake-up is waited for, the queues were empty a moment ago
                return not self._wake_up.is_awaited
            case Signal():
                return True
            case HintReceived(state):
                return self._control.receive_hint(state)
            case ReceiptAnswered(state, ack, known_epoch) if state:
                is_due = self._control.receive_receipt(ack)
                return self._control.receive_answer(state, known_epoch) or is_due
            case ReceiptAnswered():
                self._heartbeat.send_now()  # it registers again
                return False
            case HeartbeatAnswered():
                return self._handle_heartbeat(event)
            case StepFinished():
                return self._handle_step(event)
            case PartEnded(error):
                self._failure = error or self._failure
                return True

    def _handle_heartbeat(self, event: HeartbeatAnswered) -> bool:
        is_due = self._control.receive_receipt(event.report.ack)
        # the lease of a group that is being submitted may be gone because it arrived
        for job in self._groups.cancel(set(event.beat.lost) - self._groups.submitting):
            log.warning("lease lost", extra={"gid": job.gid})
        is_due |= self._groups.expire(event.beat.expiring)
        if event.beat.control:
            is_due |= self._control.receive_answer(event.beat.control, event.report.known_epoch)
        # only while the engine works as it does all the time
        if self._control.mode is Mode.RUN and not self._engine.is_paused:
            is_due |= self._claims.adapt(self._engine.load(), self._groups.shares())
        return is_due

    def _handle_step(self, event: StepFinished) -> bool:
        self._step = None
        claim = event.claim
        is_due = False
        if claim and claim.control:
            is_due = self._control.receive_answer(claim.control, event.known_epoch)
        if claim and claim.jobs:
            for job in claim.jobs:
                self._groups.start(job, self._runner.run(job))
            return True
        # a worker without room must not take wake-ups from those that have some
        if not (self._wake_up.is_awaited or self._claims.are_on_demand) and self._vacancy():
            self._wake_up.wait(IDLE_S)
        return is_due

    def _report(self) -> tuple[HeartbeatReport, list[Job], dict[Job, PolicyVersion]]:
        """Return the report, the held jobs, and their ages. Called on the heartbeat's thread."""
        # first: a receipt must not name an epoch that is newer than the rest of the report
        weights = self._engine.version()
        known_epoch = self._control.epoch
        load = self._engine.load()
        report = HeartbeatReport(
            ack=self._control.ack,
            weights=weights,
            state=self._state(),
            refusal=self._weights.refusal,
            tokens_per_s=self._token_rate.measure(self._runner.tokens),
            sampling_ms=self._engine.token_counts.sampling_ms(),
            done=self._runner.done,
            known_epoch=known_epoch,
            concurrency=self._claims.limit(),
            requests=load.running + load.waiting if load else None,
            failed=self._runner.failed,
            judging=self._groups.judging(),
            **reported(self._judges),
            retried=self._runner.retries.text(),
            **call_turns.reported(),
            replaced=REPLACED.total(),
            lengths=self._runner.lengths.text(),
            sampled=self._engine.token_counts.text(),
            **self._host.numbers(),
        )
        jobs = self._groups.jobs()
        return report, jobs, self._groups.oldest(jobs)

    def _state(self) -> WorkerState:
        if self._is_stopping:
            return WorkerState.DRAINING
        if self._engine.is_paused:
            return WorkerState.PAUSED
        return WorkerState.WORKING if self._groups else WorkerState.IDLE

    # -- steps ---------------------------------------------------------------

    async def _take_step(self) -> None:
        """Bring engine and groups to what the control state wants, send the receipt, then claim.

        One after the other: a receipt would not know the groups of a claim that is under way.
        """
        finished = StepFinished()
        try:
            self._engine.check_health()
            await self._groups.end_some()
            if state := self._control.state:
                await self._follow(state)
            if vacancy := self._vacancy():
                known_epoch = self._control.epoch
                claim = await self._claims.claim(self._engine.version(), vacancy)
                finished = StepFinished(claim, known_epoch)
        except Exception as error:
            self._inbox.post(PartEnded(error))
        self._inbox.post(finished)

    async def _follow(self, state: ControlState) -> None:
        control = self._control
        refusal = self._weights.refusal
        if not control.is_carried_out and await self._reach(state) and control.state is state:
            control.ack = state.epoch
            if not self._client.send_receipt():
                self._heartbeat.send_now()
        is_pause = state.mode in (Mode.ABORT, Mode.DRAIN)
        if control.ack == state.epoch and is_pause and not self._engine.is_asleep:
            # after the receipt, which must not wait for weights that may never load
            await self._weights.update(state)
            self._weights.prepare(state)
        if self._weights.refusal != refusal:
            self._heartbeat.send_now()

    async def _reach(self, state: ControlState) -> bool:
        """Carry out the mode. Return whether the worker may acknowledge it."""
        engine = self._engine
        if state.mode is Mode.KEEP:
            await engine.pause("keep")
            return True
        if state.mode is Mode.RUN:
            await engine.wake()
            is_loaded = await self._weights.update(state)
            await engine.resume()
            return self._weights.prepare(state) and is_loaded
        if state.mode is Mode.ABORT and self._groups:
            # repeated until none is left: a group may only now come from its prompt to the
            # engine, or from the engine to its judge
            for judges in self._judges:
                judges.pause(state.epoch)
            self._runner.interrupt()
            jobs = self._groups.jobs()
            await engine.abort(self._protection.spared(state.epoch, jobs, time.monotonic()))
            return False
        await engine.resume()
        if self._groups:
            return False
        # with the receipt, a trainer on the same device takes its memory
        if self._limits.sleep_when_paused and not state.lanes:
            await engine.sleep()
        else:
            await engine.wake()
        return True

    def _vacancy(self) -> Vacancy | None:
        state = self._control.state
        if state is None or self._is_stopping:
            return None
        if not state.lanes or self._engine.is_paused:
            return None
        # lanes that are open in a pause are claimed from once all have reported that nothing else
        # is held
        is_early = state.mode is not Mode.RUN and self._control.receipt != state.epoch
        if is_early or not self._weights.are_newest(state):
            return None
        return self._claims.vacancy(self._groups.shares())

    # -- leaving -------------------------------------------------------------

    async def _leave(self) -> None:
        """Finish groups within the time allowed; hand back the rest; deregister."""
        self._is_stopping = True
        reason = self._failure
        self._wake_up.cancel()
        try:
            # the last step has the engine, and may have claimed
            await self._handle_events(math.inf, lambda: self._step)
            if self._failure is None:
                await self._engine.resume()
                await self._handle_events(
                    self._limits.drain_timeout_s,
                    lambda: self._groups and self._control.mode not in (None, Mode.ABORT),
                )
                if self._groups:
                    self._runner.interrupt()
                    await self._engine.pause("abort")
                    await self._interrupt_judges()
        except EngineDeadError as error:
            self._failure = error
        finally:
            if self._failure is not reason:
                log.error("this worker failed while it left: %s", self._failure)
            if isinstance(self._failure, EngineDeadError):
                # groups of a dead engine release themselves; judged ones keep their tokens
                await self._interrupt_judges()
            for job in await self._groups.cancel_all():
                await self._runner.hand_back(job)
            await asyncio.to_thread(self._heartbeat.stop)
            for judges in self._judges:
                judges.close()
            await self._runner.close()
            await self._weights.close()
            self._loop_watch.stop()
        sampled = self._engine.token_counts.text()
        if not await asyncio.to_thread(self._run.fleet.deregister, self.id, self._nonce, sampled):
            log.warning("left while groups are held; their leases will run out")
        if isinstance(self._failure, GroupChanged):
            raise self._failure

    async def _interrupt_judges(self) -> None:
        for judges in self._judges:
            judges.interrupt()
        await self._handle_events(HAND_BACK_S, lambda: self._groups)
