"""The rollout worker: claims jobs for one engine, generates and judges groups, hands them in.

What it may do is decided in Redis: a claim is refused while the run is paused or its weights are
not the newest (I10), and a result is refused when the lease was lost (I2). So every step here may
die without asking anybody.

    control says      the worker                                          its receipt means
    run               loads newer weights, samples, claims                it has those weights
    keep              freezes the engine                                  nothing is sampled
    abort             takes back what the engine has; groups go to the    it holds no group
                      aborted pool, with their tokens if partial rollout is on;
                      those interrupted too often are finished (protection.py)
    drain, finish     claims nothing, ends what it has                    it holds no group
    abort, drain with no lane open: an engine that sleeps does so before  it holds no group, and no device memory
                      the receipt (colocated runs)
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Mapping
from contextlib import suppress

from buffer.control.control import ControlState, Mode
from buffer.control.fleet import Beat, Pulse, WorkerState
from buffer.errors import RolloutMQError, StoreUnavailable
from buffer.groups.job_queue import Serves
from buffer.model.ids import LANES, new_nonce
from buffer.model.job import Job
from buffer.model.limits import Concurrency
from buffer.run import Run
from buffer.store.retry import LogOnce
from producer_workers.engines.base import Engine, EngineDeadError
from producer_workers.judges.judge_times import JudgeTimes
from producer_workers.worker.capacity import Places, Vacancy
from producer_workers.worker.control_client import HeardControl, Listener
from producer_workers.worker.engine_control import SteeredEngine, WeightPull
from producer_workers.worker.group_runner import GroupWork, TaskRunner
from producer_workers.worker.heartbeat import Heart, PulseTaker
from producer_workers.worker.pending_groups import PendingGroups, Protection
from producer_workers.worker.shared_engine import SharedEngine

log = logging.getLogger("rolloutmq.worker")

IDLE_S = 1.0
"""How long an idle worker waits for a ring before it looks by itself."""

ABORT_S = 0.05
"""How often groups are aborted again until none is left."""

REFUSALS = {
    "FULL": "the run holds as many payload bytes as it may",
    "BARRED": "the trainer could not use what this worker handed in: `rolloutmq dead` says why; mend it, then "
    "`rolloutmq continue --worker ID`",
}

HAND_BACK_S = 5.0
"""How long a leaving worker waits for groups that it has aborted, before it hands them back as they
were.
"""


class Worker:
    """One worker of a run. `runners` holds one for every task that it serves, in `lanes`;
    `concurrency`: groups that are sampled at once, or "auto".
    """

    def __init__(
        self,
        run: Run,
        engine: Engine,
        runners: Mapping[str, TaskRunner],
        *,
        worker_id: str,
        concurrency: Concurrency = 8,
        drain_timeout_s: float = 60.0,
        sleeps: bool = False,
        facts: Mapping[str, str] | None = None,
        judge_times: JudgeTimes | None = None,
        lanes: Collection[str] = LANES,
    ) -> None:
        self._run = run
        self._engine = engine
        self._steered = SteeredEngine(engine, WeightPull(run))
        self.id = worker_id
        self._nonce = new_nonce()
        self._group_work = GroupWork(
            run, SharedEngine(engine, self._hear_answer), runners, worker_id
        )
        self._places = Places(
            run, engine, concurrency, Serves(frozenset(runners), frozenset(lanes))
        )
        self._drain_timeout_s = drain_timeout_s
        self._sleeps = sleeps
        self._facts = {"engine": engine.name, **(facts or {})}
        self._work = PendingGroups(self._end)
        self._protection = Protection(run.limits)
        self._changed = asyncio.Event()
        self._bell: asyncio.Task[None] | None = None
        self._control = HeardControl(self._changed.set)
        self._pulse = PulseTaker(
            engine, self._group_work, self._control, judge_times or JudgeTimes()
        )
        self._stopping = False
        self._refusal = LogOnce(log, "claiming nothing")
        self._deafness = LogOnce(log, "hearing no bell")
        self._failure: BaseException | None = None

    def stop(self) -> None:
        """Finish what is held, claim nothing more, leave. Called on the event loop."""
        self._stopping = True
        self._changed.set()

    async def run(self) -> None:
        """Work until `stop`, or until the run is finished. Raises what ends a worker: a dead
        engine, no such run.

        A server that is away does not end it: results are kept and handed in when it is back.
        """
        run = self._run
        worker = self.id
        nonce = self._nonce
        loop = asyncio.get_running_loop()
        _, state = await asyncio.to_thread(run.fleet.register, worker, nonce, self._facts)
        self._control.hear_answer(state, asked=0)
        heart = Heart(run, worker, nonce, self._facts, self._look, loop, self._hear, self._end)
        listener = Listener(run, worker, nonce, self._control, heart.poke)
        heart.start()
        async with listener.listening(self._end):
            try:
                await self._serve(listener)
            finally:
                await self._leave(heart)

    async def _serve(self, listener: Listener) -> None:
        try:
            while not (self._stopping or self._finished()):
                self._changed.clear()
                self._engine.check_health()
                await self._follow_control(listener)
                if self._failure:
                    raise self._failure
                if await self._claim():
                    continue
                # a worker without room must not take rings from those that have some
                if self._bell is None and self._vacancy():
                    self._bell = asyncio.create_task(self._listen())
                await self._wait()
        finally:
            if self._bell:
                self._bell.cancel()

    def _finished(self) -> bool:
        return self._control.mode is Mode.FINISH and not self._work

    async def _listen(self) -> None:
        """Until a job may be there."""
        try:
            await asyncio.to_thread(
                self._run.store.wait_bell, self._run.keys.bell("workers"), IDLE_S, shared=True
            )
            self._deafness.report("")
        except StoreUnavailable as error:
            self._deafness.report(error.hint)
        except RolloutMQError as error:
            self._failure = error
        finally:
            self._bell = None
            self._changed.set()

    async def _wait(self) -> None:
        """Until a group ends, the control state changes, or a job may be there."""
        aborting = self._control.mode is Mode.ABORT and not self._control.obeyed
        with suppress(TimeoutError):
            async with asyncio.timeout(ABORT_S if aborting else IDLE_S):
                await self._changed.wait()

    # -- control -------------------------------------------------------------

    def _look(self) -> tuple[Pulse, list[Job]]:
        """What the heartbeat says; called on its thread."""
        return self._pulse.take(self._state(), self._places.limit()), self._work.jobs()

    def _state(self) -> WorkerState:
        if self._stopping:
            return WorkerState.DRAINING
        if self._steered.paused:
            return WorkerState.PAUSED
        return WorkerState.WORKING if self._work else WorkerState.IDLE

    def _hear(self, beat: Beat, pulse: Pulse) -> None:
        """The answer to a heartbeat that said `pulse`."""
        self._control.hear_receipt(pulse.ack)
        # one that is being handed in may be gone because it arrived; its submit says so
        for job in self._work.cancel(set(beat.lost) - self._group_work.handing_in):
            log.warning("lease lost", extra={"gid": job.gid})
        if beat.control:
            self._control.hear_answer(beat.control, pulse.heard)
        self._adapt()

    def _adapt(self) -> None:
        """While the engine works as it does all the time."""
        steady = self._control.mode is Mode.RUN and not self._steered.paused
        if steady and self._places.adapt(self._group_work.shares(self._work.jobs())):
            self._changed.set()

    async def _follow_control(self, listener: Listener) -> None:
        """Bring engine and groups to where the control state wants them; acknowledge once they are
        there.
        """
        state = self._control.state
        if state is None:
            return
        if (
            state.epoch != self._control.ack
            and await self._reach(state)
            and self._control.state is state
        ):
            self._control.ack = state.epoch
            listener.hand_in()
        is_paused = state.mode in (Mode.ABORT, Mode.DRAIN) and not self._steered.asleep
        if state.epoch == self._control.ack and is_paused:
            # after the receipt, which must not wait for weights that may never load
            await self._steered.update(state)

    async def _reach(self, state: ControlState) -> bool:
        if state.mode is Mode.KEEP:
            await self._steered.freeze()
            return True
        if state.mode is Mode.RUN:
            await self._steered.wake()
            loaded = await self._steered.update(state)
            await self._steered.thaw()
            return loaded
        if state.mode is Mode.ABORT and self._work:
            # again and again, since a group may only now come from its prompt or its judge to the
            # engine
            await self._steered.abort(
                self._protection.spared(state.epoch, self._work.jobs(), time.monotonic())
            )
            return False
        await self._steered.thaw()
        if self._work:
            return False
        # its receipt tells a trainer on the same device that the memory is free
        await (self._steered.sleep() if self._sleeps and not state.lanes else self._steered.wake())
        return True

    # -- groups --------------------------------------------------------------

    def _vacancy(self) -> Vacancy | None:
        """What may be claimed now."""
        state = self._control.state
        # while paused some lanes may be open, but only after everybody heard that nothing else is
        # held
        may_claim = (
            state
            and state.lanes
            and (state.mode is Mode.RUN or self._control.receipt == state.epoch)
            and not (self._stopping or self._steered.paused)
            and self._steered.has_weights_of(state)
        )
        return (
            self._places.vacancy(self._group_work.shares(self._work.jobs())) if may_claim else None
        )

    def _hear_answer(self) -> None:
        """A request has ended. Who listens for jobs has found none a moment ago."""
        if self._bell is None:
            self._changed.set()

    async def _claim(self) -> bool:
        """Claim what there is room for; whether anything came."""
        vacancy = self._vacancy()
        if vacancy is None:
            return False
        asked, about = (
            self._control.epoch,
            (self._engine.version(), vacancy.limit, vacancy.serves, vacancy.sampled),
        )
        try:
            claim = await asyncio.to_thread(
                self._run.jobs.claim, self.id, self._nonce, new_nonce(), *about
            )
        except StoreUnavailable as error:
            self._refusal.report(error.hint)
            return False
        self._refusal.report(REFUSALS.get(claim.refusal or "", ""))
        if claim.control:
            self._control.hear_answer(claim.control, asked)
        for job in claim.jobs:
            self._work.schedule(job, self._group_work.do(job))
        return bool(claim.jobs)

    def _end(self, error: BaseException | None) -> None:
        self._changed.set()
        self._failure = error or self._failure

    # -- leaving -------------------------------------------------------------

    async def _leave(self, heart: Heart) -> None:
        """Finish what is held, within the time allowed; abort and hand back the rest; say good-bye."""
        self._stopping = True
        try:
            if self._failure is None:
                await self._wind_down()
        except EngineDeadError as error:
            self._failure = error
            log.error("the engine died while this worker left: %s", error)
        finally:
            await self._hand_back()
            await asyncio.to_thread(heart.stop)
            self._steered.close()
        if not await asyncio.to_thread(self._run.fleet.deregister, self.id, self._nonce):
            log.warning("left with groups in hand; their leases will run out")

    async def _wind_down(self) -> None:
        await self._steered.thaw()
        end = time.monotonic() + self._drain_timeout_s
        while (
            self._work and self._control.mode not in (None, Mode.ABORT) and time.monotonic() < end
        ):
            await self._work.wait(min(IDLE_S, end - time.monotonic()))
        if self._work:
            await self._engine.pause("abort")
            await self._work.wait(HAND_BACK_S)

    async def _hand_back(self) -> None:
        """Give back, unharmed, what could not be ended; what died with its engine gives itself
        back.
        """
        if isinstance(self._failure, EngineDeadError):
            await self._work.wait(HAND_BACK_S)
        for job in await self._work.cancel_all():
            await self._group_work.hand_back(job)
