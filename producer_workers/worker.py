"""The rollout worker: claims jobs for one engine, generates and judges groups, hands them in.

What it may do is decided in Redis: a claim is refused while the run is paused or its weights are not the newest
(I10), and a result is refused when the lease was lost (I2). So every step here may die without asking anybody.

    control says      the worker                                          its receipt means
    run               loads newer weights, samples, claims                it has those weights
    keep              freezes the engine                                  nothing is sampled
    abort             takes back what the engine has; groups go to the    it holds no group
                      aborted pool, with their tokens if partial rollout is on
    drain, finish     claims nothing, ends what it has                    it holds no group
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from pathlib import Path

from buffer.control import ControlState, Mode, new_nonce
from buffer.errors import Fenced, RolloutMQError, StoreUnavailable
from buffer.fleet import Beat, Pulse
from buffer.group import RolloutGroup
from buffer.jobs import Job
from buffer.rollout import Status
from buffer.run import Run
from producer_workers.agent_loops.agent_loop import AgentLoop
from producer_workers.engines.base import Engine, EngineDeadError, WeightsError
from producer_workers.heart import Heart
from producer_workers.weight_pull import verify_weights

log = logging.getLogger("rolloutmq.worker")

IDLE_S = 1.0
"""How long an idle worker waits for a ring before it looks by itself."""


ABORT_S = 0.05
"""How often groups are aborted again until none is left."""


class Worker:
    """One worker of a run. `loops` holds an agent loop for every task; `concurrency` groups in work at once."""

    def __init__(
        self,
        run: Run,
        engine: Engine,
        loops: Mapping[str, AgentLoop],
        *,
        worker_id: str,
        concurrency: int = 8,
        partial_rollout: bool = False,
        drain_timeout_s: float = 60.0,
        facts: Mapping[str, str] | None = None,
    ) -> None:
        self._run, self._engine, self._loops = run, engine, loops
        self.id, self._nonce = worker_id, new_nonce()
        self._concurrency, self._partial = concurrency, partial_rollout
        self._drain_timeout_s = drain_timeout_s
        self._facts = {"engine": engine.name, "concurrency": str(concurrency), **(facts or {})}
        # by task, not by gid: a group that failed here may be claimed here again before its first task has ended
        self._work: dict[asyncio.Task[None], Job] = {}
        self._handing_in: set[Job] = set()
        self._control: ControlState | None = None
        self._changed = asyncio.Event()
        self._ack, self._paused = 0, False
        self._stopping = False
        self._done, self._tokens, self._rate = 0, 0, (time.monotonic(), 0, 0.0)
        self._refused_weights = ""
        self._failure: BaseException | None = None

    def stop(self) -> None:
        """Finish what is held, claim nothing more, leave. Call it on the event loop (a signal handler does)."""
        self._stopping = True
        self._changed.set()

    async def run(self) -> None:
        """Work until `stop`, or until the run is finished. Raises what ends a worker: a dead engine, a lost run."""
        loop = asyncio.get_running_loop()
        _, self._control = await asyncio.to_thread(self._run.fleet.register, self.id, self._nonce, self._facts)

        def tell(beat: Beat) -> None:
            loop.call_soon_threadsafe(self._hear, beat)

        heart = Heart(self._run, self.id, self._nonce, self._facts, self._look, tell)
        heart.start()
        try:
            await self._serve(heart)
        finally:
            await self._leave(heart)

    async def _serve(self, heart: Heart) -> None:
        bell: asyncio.Future[bool] | None = None
        try:
            while not (self._stopping or self._finished()):
                self._changed.clear()
                await self._follow_control(heart)
                if self._failure:
                    raise self._failure
                if await self._claim():
                    continue
                bell = bell if bell and not bell.done() else self._listen()
                await self._wait_for(bell)
        finally:
            if bell:
                bell.cancel()

    def _finished(self) -> bool:
        return self._control is not None and self._control.mode is Mode.FINISH and not self._work

    def _listen(self) -> asyncio.Future[bool]:
        bell = self._run.keys.bell("workers")
        return asyncio.ensure_future(asyncio.to_thread(self._run.store.wait_bell, bell, IDLE_S, shared=True))

    async def _wait_for(self, bell: asyncio.Future[bool]) -> None:
        """Until a group ends, the control state changes, or (with room left) a job may be there."""
        change: asyncio.Future[bool] = asyncio.ensure_future(self._changed.wait())
        waiting = {change}
        if self._may_claim():
            waiting.add(bell)
        aborting = self._control is not None and self._control.mode is Mode.ABORT and bool(self._work)
        await asyncio.wait(waiting, timeout=ABORT_S if aborting else IDLE_S, return_when=asyncio.FIRST_COMPLETED)
        change.cancel()
        if bell.done():
            bell.result()

    # -- control -------------------------------------------------------------

    def _look(self) -> tuple[Pulse, list[Job]]:
        """What the heartbeat says; called on its thread."""
        then, tokens, _ = self._rate
        now = time.monotonic()
        if now - then > 1.0:
            self._rate = (now, self._tokens, (self._tokens - tokens) / (now - then))
        pulse = Pulse(self._ack, self._engine.version(), self._state(), self._rate[2], self._done)
        return pulse, list(self._work.values())

    def _state(self) -> str:
        if self._stopping:
            return "draining"
        if self._paused:
            return "paused"
        return "working" if self._work else "idle"

    def _hear(self, beat: Beat) -> None:
        for task, job in list(self._work.items()):
            # one that is being handed in may be gone because it arrived; its submit says so
            if job in beat.lost and job not in self._handing_in:
                log.warning("lease lost", extra={"gid": job.gid})
                task.cancel()
        if beat.control and (self._control is None or beat.control.epoch != self._control.epoch):
            self._control = beat.control
            self._changed.set()

    async def _follow_control(self, heart: Heart) -> None:
        """Bring engine and groups to where the control state wants them; acknowledge once they are there."""
        state = self._control
        if state is None or state.epoch == self._ack:
            return
        if await self._reach(state) and self._control is state:
            self._ack = state.epoch
            heart.poke()

    async def _reach(self, state: ControlState) -> bool:
        match state.mode:
            case Mode.KEEP:
                await self._pause()
                return True
            case Mode.ABORT:
                if self._work:
                    # again and again, since a group may only now come from its prompt or its judge to the engine
                    await self._engine.pause("abort")
                    await self._engine.resume()
                    self._paused = False
                    return False
                await self._resume()
                return await self._update_weights(state)
            case Mode.DRAIN | Mode.FINISH:
                await self._resume()
                return not self._work and (state.mode is Mode.FINISH or await self._update_weights(state))
        if not await self._update_weights(state):
            return False
        await self._resume()
        return True

    async def _pause(self) -> None:
        if not self._paused:
            await self._engine.pause("keep")
            self._paused = True

    async def _resume(self) -> None:
        if self._paused:
            await self._engine.resume()
            self._paused = False

    async def _update_weights(self, state: ControlState) -> bool:
        """Load the newest weights where the engine has others; whether it has them now."""
        if state.weights == self._engine.version():
            return True
        started = time.monotonic()
        await self._pause()
        try:
            await asyncio.to_thread(verify_weights, Path(state.weights_path), state.weights_checksum)
            await self._engine.load_weights(Path(state.weights_path), state.weights)
        except WeightsError as error:
            self._refuse(state, error)
            return False
        log.info("weights loaded", extra={"weights": str(state.weights), "seconds": time.monotonic() - started})
        return True

    def _refuse(self, state: ControlState, error: WeightsError) -> None:
        """Stay on the old weights and say so, once; the next control change or round tries again."""
        if self._refused_weights != str(state.weights):
            self._refused_weights = str(state.weights)
            log.error("weights refused, staying on %s: %s", self._engine.version(), error)

    # -- groups --------------------------------------------------------------

    def _may_claim(self) -> bool:
        state = self._control
        return bool(
            state
            and state.lanes
            and not (self._stopping or self._paused)
            and state.weights == self._engine.version()
            and len(self._work) < self._concurrency
        )

    async def _claim(self) -> bool:
        """Claim as much as there is room for, but leave some for others; whether anything came."""
        if not self._may_claim():
            return False
        free = self._concurrency - len(self._work)
        limit = min(free, max(1, self._concurrency // 4))
        claim = await asyncio.to_thread(
            self._run.jobs.claim, self.id, self._nonce, new_nonce(), self._engine.version(), limit
        )
        if claim.control and self._control and claim.control.epoch != self._control.epoch:
            self._control = claim.control
            self._changed.set()
        for job in claim.jobs:
            task = asyncio.create_task(self._generate(job), name=job.gid)
            self._work[task] = job
            task.add_done_callback(self._end)
        return bool(claim.jobs)

    def _end(self, task: asyncio.Task[None]) -> None:
        self._handing_in.discard(self._work.pop(task))
        self._changed.set()
        if not task.cancelled() and (error := task.exception()):
            self._failure = error

    async def _generate(self, job: Job) -> None:
        """One group, from its claim to its submit. Its failure is its own; a dead engine is the worker's."""
        try:
            group = await asyncio.to_thread(self._run.buffer.get, job.payload)
            known = len(group.response_ids)
            states = await self._loops[job.task].generate_group(group.states, self._engine, job.gid)
            await self._hand_in(job, RolloutGroup(job.gid, job.task, states), known)
        except Fenced as error:
            log.warning("result not wanted: %s", error, extra={"gid": job.gid})
        except EngineDeadError:
            await self._release(job, "handback", "the engine died")
            raise
        except Exception as error:  # one group's failure is not the worker's: it is counted, kept with its reason
            unknown = not isinstance(error, RolloutMQError)
            log.warning("group failed: %s", error, extra={"gid": job.gid}, exc_info=unknown)
            await self._release(job, "failed", f"{type(error).__name__}: {error}")

    async def _hand_in(self, job: Job, group: RolloutGroup, known: int) -> None:
        self._handing_in.add(job)
        status = group.status
        if status is Status.FAILED:
            errors = {m["error"] for m in group.members if m.get("error")}
            await self._release(job, "failed", "; ".join(sorted(errors)))
        elif status is Status.ABORTED and not self._partial:
            await self._release(job, "aborted", "paused")
        else:
            await self._submit(job, group, max(0, len(group.response_ids) - known))

    async def _submit(self, job: Job, group: RolloutGroup, new_tokens: int) -> None:
        """Hand a result in; while the server is away, keep it and try again."""
        while True:
            try:
                await asyncio.to_thread(self._run.buffer.submit, self.id, job, group, new_tokens)
            except StoreUnavailable as error:
                log.warning("keeping a result: %s", error, extra={"gid": job.gid})
            else:
                break
        self._tokens += new_tokens
        self._done += group.status is Status.COMPLETED

    async def _release(self, job: Job, kind: str, reason: str) -> None:
        try:
            await asyncio.to_thread(self._run.jobs.release, self.id, job, kind, reason)  # type: ignore[arg-type]
        except Fenced as error:
            log.warning("nothing to give back: %s", error, extra={"gid": job.gid})

    # -- leaving -------------------------------------------------------------

    async def _leave(self, heart: Heart) -> None:
        """Finish what is held, within the time allowed; abort and hand back the rest; say good-bye."""
        self._stopping = True
        if self._failure is None:
            await self._resume()
            await self._finish_work(self._drain_timeout_s)
            if self._work:
                await self._engine.pause("abort")
        await self._finish_work(5.0)
        for task in list(self._work):
            task.cancel()
        await asyncio.to_thread(heart.stop)
        if not await asyncio.to_thread(self._run.fleet.deregister, self.id, self._nonce):
            log.warning("left with groups in hand; their leases will run out")

    async def _finish_work(self, timeout_s: float) -> None:
        if self._work:
            await asyncio.wait(list(self._work), timeout=timeout_s)
