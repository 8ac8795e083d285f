"""New weights on their way into the engine, which samples with the old ones meanwhile.

A trainer announces weights before the pause, so that the pause only holds the switch. The worker
fetches and verifies one version at a time, and continues with the newest.

Invariant: weights that are torn, foreign or refused leave the engine exactly as it was (I9). The
worker tries them again, ever less often, until they load or the trainer publishes newer ones.

    the fetch        the version that is wanted    then
    is under way     the same                      wait for its end
                     another one                   wait, discard it, fetch the other one
    has ended        the same                      keep it until it is published
                     another one                   discard it, fetch the other one
    failed           the same                      refused, fetched again later
                     another one                   fetch the other one: the first may be deleted
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, TypeVar

from buffer.control.control import ControlState, LocatedWeights
from buffer.errors import StoreUnavailable, WireError
from buffer.redis.connection.retry import Backoff
from buffer.run import Run
from buffer.weights.receiver import WeightsReceiver
from buffer.weights.transport import Announcement, PublishedWeights
from buffer.wire.rollout import PolicyVersion
from producer_workers.engines.base import Engine, ReceivesWeights, WeightsError
from producer_workers.worker.inbox import Inbox, Signal

log = logging.getLogger("rolloutmq.worker")
T = TypeVar("T")

# Pauses before refused weights are tried again: each attempt reads the whole folder.
BACKOFF = Backoff(0.5, 30.0, jitter=0.0)


class _Fetched(NamedTuple):
    """Where weights are: in a verified folder, or with the trainer, if `announced`."""

    folder: Path
    announced: Announcement | None


class WeightUpdates:
    """Keeps the engine on the newest weights. One caller at a time; posts WEIGHTS_FETCHED.

    `refusal`: the weights that could not be loaded, and why; "" once newer ones load. Any thread
    may read it.
    """

    def __init__(self, run: Run, engine: Engine, inbox: Inbox) -> None:
        self._run = run
        self._engine = engine
        self._inbox = inbox
        self.refusal = ""
        self._refused: PolicyVersion | None = None
        self._retry_at = 0.0
        self._refusals = 0
        self._wanted: LocatedWeights | None = None
        self._fetch: asyncio.Task[_Fetched] | None = None

    @cached_property
    def _receiver(self) -> WeightsReceiver:
        return WeightsReceiver(self._run.store, self._run.keys)

    def are_newest(self, state: ControlState) -> bool:
        return state.weights == self._engine.version()

    async def update(self, state: ControlState) -> bool:
        """Load the newest weights once they are fetched. Return whether the engine has them."""
        if self.are_newest(state):
            return True
        if self._refused and state.announced:
            return False  # weights that cannot be loaded are not tried again just before the next
        if self._refused == state.weights and not self._is_retry_due():
            return False
        started = time.monotonic()
        try:
            if not self._has(state.published):
                return False
            assert self._fetch
            fetched = self._fetch.result()
            self._fetch = None
            if not await self._load(fetched, state):
                return False
        except WeightsError as error:
            self._refuse(state.weights, error)
            return False
        self._refused = None
        self.refusal = ""
        await asyncio.to_thread(self._receiver.keep_only, fetched.folder)
        seconds = time.monotonic() - started
        log.info("weights loaded", extra={"weights": str(state.weights), "seconds": seconds})
        return True

    def prepare(self, state: ControlState) -> bool:
        """Fetch the announced weights. Return whether the fetch ended, well or not."""
        announced = state.announced
        if announced is None or announced.weights == self._engine.version():
            return True
        if not self.are_newest(state) and not self._refused:
            return False  # one fetch at a time: first the newest
        if self._refused == announced.weights and not self._is_retry_due():
            return True
        try:
            return self._has(announced)
        except WeightsError as error:
            self._refuse(announced.weights, error)
            return True

    async def close(self) -> None:
        """Wait for the end of a fetch, and delete downloaded weights."""
        if self._fetch:
            await asyncio.gather(self._fetch, return_exceptions=True)
        if "_receiver" in self.__dict__:
            await asyncio.to_thread(self._receiver.close)

    def _has(self, wanted: LocatedWeights) -> bool:
        """Return whether these weights are there; else begin a fetch. Raises its error."""
        if self._fetch is None:
            self._begin(wanted)
        elif self._fetch.done():
            failed = self._fetch.exception()
            if self._wanted != wanted:
                log.debug("weights %s are replaced by others", self._wanted)
                self._begin(wanted)
            elif failed:
                self._fetch = None
                raise failed
            else:
                return True
        return False

    def _begin(self, wanted: LocatedWeights, *, may_receive: bool = True) -> None:
        """Begin to fetch weights, from their folder unless `may_receive`."""
        self._wanted = wanted
        self._fetch = asyncio.create_task(self._get(wanted, may_receive), name="next-weights")
        self._fetch.add_done_callback(lambda _: self._inbox.post(Signal.WEIGHTS_FETCHED))

    async def _get(self, wanted: LocatedWeights, may_receive: bool) -> _Fetched:
        engine = self._engine
        published = PublishedWeights(wanted.path, wanted.checksum)
        if may_receive and isinstance(engine, ReceivesWeights) and engine.receives_weights():
            problem = f"cannot read the announcement of the weights {wanted.weights}"
            announced = await _read(problem, lambda: self._receiver.announcement(published))
            if announced:
                return _Fetched(Path(announced.folder), announced)
        problem = f"cannot use the weights in {wanted.path}"
        folder = await _read(problem, lambda: self._receiver.fetch(published))
        return _Fetched(folder, None)

    async def _load(self, fetched: _Fetched, state: ControlState) -> bool:
        """Load from the trainer's memory, or from the folder. False: fetch the folder next."""
        engine = self._engine
        if fetched.announced is None:
            await engine.load_weights(fetched.folder, state.weights)
            return True
        assert isinstance(engine, ReceivesWeights)
        try:
            await engine.receive_weights(fetched.announced, state.weights)
        except WeightsError as error:
            log.warning("cannot receive from the trainer, reading the folder: %s", error)
            self._begin(state.published, may_receive=False)
            return False
        return True

    def _is_retry_due(self) -> bool:
        return time.monotonic() >= self._retry_at

    def _refuse(self, weights: PolicyVersion, error: WeightsError) -> None:
        """Log a refusal once for every version, and plan the next try."""
        self.refusal = f"{weights} {error}"
        if self._refused != weights:
            self._refused = weights
            self._refusals = 0
            log.error("weights refused, staying on %s: %s", self._engine.version(), error)
        self._retry_at = time.monotonic() + BACKOFF.pause_s(self._refusals)
        self._refusals += 1


async def _read(problem: str, call: Callable[[], T]) -> T:
    """Run `call` on a thread. Raises WeightsError for the errors of a receiver."""
    try:
        return await asyncio.to_thread(call)
    except (OSError, WireError, StoreUnavailable) as error:
        raise WeightsError(f"{problem}: {error}") from error
