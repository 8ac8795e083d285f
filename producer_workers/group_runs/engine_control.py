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
from pathlib import Path

from buffer.control.control import ControlState
from buffer.errors import StoreUnavailable, WireError
from buffer.rollouts.rollout import PolicyVersion
from buffer.run import Run
from buffer.store.retry import Backoff
from buffer.weights.announcement import Announcement
from buffer.weights.registry import AnyReceiver
from buffer.weights.transport import PublishedWeights
from producer_workers.engines.base import (
    AbortsGroups,
    Engine,
    EngineLoad,
    ReceivesWeights,
    ReportsLoad,
    WeightsError,
)

log = logging.getLogger("rolloutmq.worker")

BACKOFF = Backoff(0.5, 30.0, jitter=0.0)
"""Pauses before refused weights are tried again: each attempt reads the whole folder."""


class WeightSource:
    """Finds the published weights that a control state names. Lookups raise WeightsError."""

    def __init__(self, run: Run) -> None:
        self._receiver = AnyReceiver(run.store, run.keys)

    def announcement(self, state: ControlState) -> Announcement | None:
        """Return how engines get these weights from the trainer's memory, if they can."""
        try:
            return self._receiver.announcement(_published(state))
        except (OSError, WireError, StoreUnavailable) as error:
            message = f"cannot read the announcement of the weights {state.weights}: {error}"
            raise WeightsError(message) from error

    def fetch(self, state: ControlState) -> Path:
        """Return a folder with these weights, verified. Without a checksum, nothing is verified."""
        try:
            return self._receiver.fetch(_published(state))
        except (OSError, WireError, StoreUnavailable) as error:
            where = state.weights_path
            raise WeightsError(f"cannot use the weights in {where}: {error}") from error

    def keep_only(self, folder: Path) -> None:
        """Delete downloads other than `folder`, which the engine now runs."""
        self._receiver.keep_only(folder)

    def close(self) -> None:
        """Delete all downloads."""
        self._receiver.close()


def _published(state: ControlState) -> PublishedWeights:
    return PublishedWeights(state.weights_path, state.weights_checksum)


class ControlledEngine:
    """An engine, and what must be remembered of it between two control states.

    One caller at a time; `version`, `load` and the flags may be read on any thread.
    """

    def __init__(self, engine: Engine, source: WeightSource) -> None:
        self._engine = engine
        self._source = source
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
        """Load the newest weights unless the engine has them. Return whether it has them now."""
        if self.has_weights_of(state):
            return True
        if self._refused == state.weights and time.monotonic() < self._retry_at:
            return False
        started = time.monotonic()
        try:
            path = await self._load(state)
        except WeightsError as error:
            self._refuse(state.weights, error)
            return False
        self._refused = None
        self.refusal = ""
        await asyncio.to_thread(self._source.keep_only, path)
        seconds = time.monotonic() - started
        log.info("weights loaded", extra={"weights": str(state.weights), "seconds": seconds})
        return True

    async def _load(self, state: ControlState) -> Path:
        """Load from the trainer's memory if both sides can, otherwise from the folder.

        Returns the folder where these weights are in either case.
        """
        engine = self._engine
        announced = await asyncio.to_thread(self._source.announcement, state)
        if announced and isinstance(engine, ReceivesWeights) and engine.receives_weights():
            try:
                await engine.receive_weights(announced, state.weights)
                return Path(announced.folder)
            except WeightsError as error:
                log.warning("cannot receive from the trainer, reading the folder: %s", error)
        path = await asyncio.to_thread(self._source.fetch, state)
        await engine.load_weights(path, state.weights)
        return path

    def close(self) -> None:
        """Delete downloaded weights. No more will be loaded."""
        self._source.close()

    def _refuse(self, weights: PolicyVersion, error: WeightsError) -> None:
        """Log a refusal, once for every version, and plan the next try."""
        self.refusal = f"{weights} {error}"
        if self._refused != weights:
            self._refused = weights
            self._refusals = 0
            log.error("weights refused, staying on %s: %s", self._engine.version(), error)
        self._retry_at = time.monotonic() + BACKOFF.pause_s(self._refusals)
        self._refusals += 1
