"""The engine as its worker controls it: frozen, sampling or asleep, with the newest weights.

Invariant: weights that are torn, foreign or refused leave the engine exactly as it was, with the
old weights and neither more nor less paused (I9). They are tried again, less and less often, until
they load or newer ones are published.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection

from buffer.control.control import ControlState
from buffer.redis.connection.retry import Backoff
from buffer.rollouts.rollout import PolicyVersion
from producer_workers.engines.base import (
    AbortsGroups,
    Engine,
    EngineLoad,
    ReceivesWeights,
    ReportsLoad,
    WeightsError,
)
from producer_workers.worker.inbox import Inbox
from producer_workers.worker.weight_updates import Fetched, NextWeights, WeightSource

log = logging.getLogger("rolloutmq.worker")

BACKOFF = Backoff(0.5, 30.0, jitter=0.0)
"""Pauses before refused weights are tried again: each attempt reads the whole folder."""


class ControlledEngine:
    """An engine, and what must be remembered of it between two control states.

    One caller at a time; `version`, `load` and the flags may be read on any thread.
    """

    def __init__(self, engine: Engine, source: WeightSource, inbox: Inbox) -> None:
        self._engine = engine
        self._source = source
        self._next = NextWeights(engine, source, inbox)
        self.is_paused = self.is_asleep = False
        self.refusal = ""
        """the weights that could not be loaded, and why; "" once newer ones are loaded"""
        self._refused: PolicyVersion | None = None
        self._retry_at = 0.0
        self._refusals = 0

    def version(self) -> PolicyVersion:
        """Return the weights that the engine runs."""
        return self._engine.version()

    def load(self) -> EngineLoad | None:
        """Return how full the engine is; None if it does not report that."""
        return self._engine.load() if isinstance(self._engine, ReportsLoad) else None

    def check_health(self) -> None:
        """Raise EngineDeadError if the engine is gone."""
        self._engine.check_health()

    def has_weights_of(self, state: ControlState) -> bool:
        """Return whether the engine runs the newest weights."""
        return state.weights == self._engine.version()

    async def freeze(self) -> None:
        """Sample nothing until `thaw`."""
        if not self.is_paused:
            await self._engine.pause("keep")
            self.is_paused = True

    async def thaw(self) -> None:
        """Sample again what was frozen."""
        if self.is_paused:
            await self._engine.resume()
            self.is_paused = False

    async def sleep(self) -> None:
        """Leave the device's memory to another process until `wake`. Nothing may be running."""
        if not self.is_asleep:
            await self._engine.sleep()
            self.is_asleep = True

    async def wake(self) -> None:
        """Take the device's memory back."""
        if self.is_asleep:
            await self._engine.wake()
            self.is_asleep = False

    async def abort(self, spared: Collection[str] = ()) -> None:
        """End all requests but those of the groups `spared`, and sample later requests."""
        if spared:
            await self.thaw()
            await self.abort_others(spared)
            return
        await self.halt()
        await self.thaw()

    async def abort_others(self, spared: Collection[str]) -> bool:
        """End all requests but those of the groups `spared`, also while nothing is sampled.

        Return False where the engine cannot.
        """
        if not isinstance(self._engine, AbortsGroups):
            return False
        await self._engine.abort_others(spared)
        return True

    async def halt(self) -> None:
        """End all requests, and sample nothing until `thaw`."""
        await self._engine.pause("abort")
        self.is_paused = True

    async def update(self, state: ControlState) -> bool:
        """Load the newest weights, once they are at hand. Return whether the engine has them.

        They are fetched in the background, while the engine samples, unless it is frozen.
        """
        if self.has_weights_of(state):
            return True
        if self._refused and state.announced:
            return False  # weights that cannot be loaded are not tried again just before the next
        if self._refused == state.weights and not self._is_retry_due():
            return False
        started = time.monotonic()
        try:
            fetched = self._next.take(state.published)
            if fetched is None or not await self._load(fetched, state):
                return False
        except WeightsError as error:
            self._refuse(state.weights, error)
            return False
        self._refused = None
        self.refusal = ""
        await asyncio.to_thread(self._source.keep_only, fetched.folder)
        seconds = time.monotonic() - started
        log.info("weights loaded", extra={"weights": str(state.weights), "seconds": seconds})
        return True

    def prepare(self, state: ControlState) -> bool:
        """Fetch the weights that are announced. Return whether that has ended, well or not."""
        announced = state.announced
        if announced is None or announced.weights == self._engine.version():
            return True
        if not self.has_weights_of(state) and not self._refused:
            return False  # one fetch at a time: first the newest
        if self._refused == announced.weights and not self._is_retry_due():
            return True
        try:
            return self._next.has(announced)
        except WeightsError as error:
            self._refuse(announced.weights, error)
            return True

    async def _load(self, fetched: Fetched, state: ControlState) -> bool:
        """Load from the trainer's memory, or from the folder. False: the folder is fetched next."""
        engine = self._engine
        if fetched.announced is None:
            await engine.load_weights(fetched.folder, state.weights)
            return True
        assert isinstance(engine, ReceivesWeights)
        try:
            await engine.receive_weights(fetched.announced, state.weights)
        except WeightsError as error:
            log.warning("cannot receive from the trainer, reading the folder: %s", error)
            self._next.begin(state.published, may_receive=False)
            return False
        return True

    async def close(self) -> None:
        """Delete downloaded weights. No more will be loaded."""
        await self._next.close()

    def _is_retry_due(self) -> bool:
        return time.monotonic() >= self._retry_at

    def _refuse(self, weights: PolicyVersion, error: WeightsError) -> None:
        """Log a refusal, once for every version, and plan the next try."""
        self.refusal = f"{weights} {error}"
        if self._refused != weights:
            self._refused = weights
            self._refusals = 0
            log.error("weights refused, staying on %s: %s", self._engine.version(), error)
        self._retry_at = time.monotonic() + BACKOFF.pause_s(self._refusals)
        self._refusals += 1
