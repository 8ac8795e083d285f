"""An engine as the worker steers it: frozen or sampling, and with the newest weights it could load.

Invariant: weights that are torn, foreign or refused by the engine leave it exactly as it was, with
the old ones and neither more nor less paused; they are tried again, less and less often, until they
load or newer ones come.

The worker's access to published weights: torn or foreign ones never reach the engine (I9).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection
from pathlib import Path

from buffer.control.control import ControlState
from buffer.errors import StoreUnavailable, WireError
from buffer.run import Run
from buffer.store.retry import Backoff
from buffer.weights.announcement import Announcement
from buffer.weights.registry import AnyReceiver
from buffer.weights.transport import PublishedWeights
from producer_workers.engines.base import AbortsSome, Engine, ReceivesWeights, WeightsError


class WeightPull:
    """Finds the weights that a control state names. Both lookups raise WeightsError."""

    def __init__(self, run: Run) -> None:
        self._receiver = AnyReceiver(run.store, run.keys)

    def announcement(self, state: ControlState) -> Announcement | None:
        """Return how engines get these weights from the trainer's memory, if they can."""
        try:
            return self._receiver.announcement(_published(state))
        except (OSError, WireError, StoreUnavailable) as error:
            message = f"no announcement of the weights {state.weights}: {error}"
            raise WeightsError(message) from error

    def fetch(self, state: ControlState) -> Path:
        """Return a folder with these weights, verified. A missing checksum verifies nothing."""
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


log = logging.getLogger("rolloutmq.worker")

BACKOFF = Backoff(0.5, 30.0, jitter=0.0)
"""Pauses before refused weights are tried again. Each attempt reads the whole folder."""


class SteeredEngine:
    """`engine` with the little that must be remembered between two control states."""

    def __init__(self, engine: Engine, pull: WeightPull) -> None:
        self._engine = engine
        self._pull = pull
        self.paused = self.asleep = False
        self._refused = ""
        self._retry_at = 0.0
        self._refusals = 0

    def has_weights_of(self, state: ControlState) -> bool:
        return state.weights == self._engine.version()

    async def freeze(self) -> None:
        """Sample nothing until `thaw`."""
        if not self.paused:
            await self._engine.pause("keep")
            self.paused = True

    async def thaw(self) -> None:
        if self.paused:
            await self._engine.resume()
            self.paused = False

    async def sleep(self) -> None:
        """Let somebody else have the device, until `wake`. Nothing may run."""
        if not self.asleep:
            await self._engine.sleep()
            self.asleep = True

    async def wake(self) -> None:
        if self.asleep:
            await self._engine.wake()
            self.asleep = False

    async def abort(self, spared: Collection[str] = ()) -> None:
        """Take back what the engine has, but for the groups `spared`; it samples again for whatever
        comes next.
        """
        if spared:
            await self.thaw()
            if isinstance(self._engine, AbortsSome):
                await self._engine.abort_others(spared)
            return
        await self._engine.pause("abort")
        await self._engine.resume()
        self.paused = False

    async def update(self, state: ControlState) -> bool:
        """Load the newest weights where the engine has others; whether it has them now."""
        if self.has_weights_of(state):
            return True
        if self._refused == str(state.weights) and time.monotonic() < self._retry_at:
            return False
        started = time.monotonic()
        try:
            path = await self._load(state)
        except WeightsError as error:
            self._refuse(state, error)
            return False
        self._refused = ""
        await asyncio.to_thread(self._pull.keep_only, path)
        log.info(
            "weights loaded",
            extra={"weights": str(state.weights), "seconds": time.monotonic() - started},
        )
        return True

    async def _load(self, state: ControlState) -> Path:
        """From the trainer's memory where both sides can, else from the folder, where they lie
        then.
        """
        engine = self._engine
        announced = await asyncio.to_thread(self._pull.announcement, state)
        if announced and isinstance(engine, ReceivesWeights) and engine.receives_weights():
            try:
                await engine.receive_weights(announced, state.weights)
                return Path(announced.folder)
            except WeightsError as error:
                log.warning("not from the trainer, so from the folder: %s", error)
        path = await asyncio.to_thread(self._pull.fetch, state)
        await engine.load_weights(path, state.weights)
        return path

    def close(self) -> None:
        """No more weights will be loaded."""
        self._pull.close()

    def _refuse(self, state: ControlState, error: WeightsError) -> None:
        """Say so, once for every version, and plan the next try."""
        if self._refused != str(state.weights):
            self._refused = str(state.weights)
            self._refusals = 0
            log.error("weights refused, staying on %s: %s", self._engine.version(), error)
        self._retry_at = time.monotonic() + BACKOFF.pause_s(self._refusals)
        self._refusals += 1
