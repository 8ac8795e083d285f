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
from functools import cached_property
from pathlib import Path

from buffer.control.control import ControlState, LocatedWeights
from buffer.errors import StoreUnavailable, WireError
from buffer.redis.retry import Backoff
from buffer.run.run import Run
from buffer.weights.transport import PublishedWeights
from buffer.weights.transports import WeightsReceiver
from buffer.wire.rollout import PolicyVersion
from producer_workers.engines.base import Engine, WeightsError
from producer_workers.worker.inbox import Inbox, Signal

log = logging.getLogger("rolloutmq.worker")

# Pauses before refused weights are tried again: each attempt reads the whole folder.
BACKOFF = Backoff(0.5, 30.0, jitter=0.0)


class WeightUpdates:
    """Keeps the engine on the newest weights. One caller at a time; posts WEIGHTS_FETCHED.

    `refusal`: the weights that could not be loaded, and why; "" once newer ones load. Any thread
    may read it. `url`: where this worker may fetch weights (`WeightsReceiver`).
    """

    def __init__(self, run: Run, engine: Engine, inbox: Inbox, url: str | None = None) -> None:
        self._run = run
        self._url = url
        self._engine = engine
        self._inbox = inbox
        self.refusal = ""
        self._refused: PolicyVersion | None = None
        self._retry_at = 0.0
        self._refusals = 0
        self._wanted: LocatedWeights | None = None
        self._fetch: asyncio.Task[Path] | None = None

    @cached_property
    def _receiver(self) -> WeightsReceiver:
        return WeightsReceiver(self._run.store, self._run.keys, self._url)

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
            folder = self._fetch.result()
            self._fetch = None
            await self._engine.load_weights(folder, state.weights)
        except WeightsError as error:
            self._refuse(state.weights, error)
            return False
        self._refused = None
        self.refusal = ""
        await asyncio.to_thread(self._receiver.keep_only, folder)
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

    def _begin(self, wanted: LocatedWeights) -> None:
        async def fetch() -> Path:
            published = PublishedWeights(wanted.path, wanted.checksum)
            try:
                return await asyncio.to_thread(self._receiver.fetch, published)
            except (OSError, WireError, StoreUnavailable) as error:
                raise WeightsError(f"cannot use the weights in {wanted.path}: {error}") from error

        self._wanted = wanted
        self._fetch = asyncio.create_task(fetch(), name="next-weights")
        self._fetch.add_done_callback(lambda _: self._inbox.post(Signal.WEIGHTS_FETCHED))

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
