"""The newest weights on their way to the engine, while it still samples with the old ones.

They are fetched, verified and, where the engine can, read into a second buffer, one version at a
time: a worker that misses versions meanwhile continues with the newest. Nothing here touches the
weights that the engine runs.

    the fetch        the version that is wanted    then
    is under way     the same                      wait for its end
                     a newer one                   wait, discard it, fetch the newer one
    failed           the same                      refused (engine_control.py), fetched again later
                     a newer one                   fetch the newer one: the older may be deleted
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import NamedTuple

from buffer.control.control import ControlState
from buffer.errors import StoreUnavailable, WireError
from buffer.rollouts.rollout import PolicyVersion
from buffer.run import Run
from buffer.weights.announcement import Announcement
from buffer.weights.registry import open_receiver
from buffer.weights.transport import PublishedWeights
from producer_workers.engines.base import Engine, PreparesWeights, ReceivesWeights, WeightsError
from producer_workers.group_runs.inbox import Inbox, WeightsFetched

log = logging.getLogger("rolloutmq.worker")


class WeightSource:
    """Finds the published weights that a control state names. Lookups raise WeightsError."""

    def __init__(self, run: Run) -> None:
        self._receiver = open_receiver(run.store, run.keys)

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


class Fetched(NamedTuple):
    """Where weights are: in a folder that was verified, or with the trainer, if `announced`."""

    folder: Path
    announced: Announcement | None


class NextWeights:
    """Fetches one version at a time in the background, and posts WeightsFetched at its end."""

    def __init__(self, engine: Engine, source: WeightSource, inbox: Inbox) -> None:
        self._engine = engine
        self._source = source
        self._inbox = inbox
        self._weights: PolicyVersion | None = None
        self._task: asyncio.Task[Fetched] | None = None

    def of(self, state: ControlState) -> Fetched | None:
        """Return the newest weights, once they are there; begin to fetch them if need be.

        Raises the error that ended the fetch: WeightsError, EngineDeadError.
        """
        if self._task is None:
            self.begin(state)
        if self._task is None or not self._task.done():
            return None
        task = self._task
        self._task = None
        if self._weights == state.weights:
            return task.result()
        if task.exception() is None:
            log.debug("weights %s are replaced by newer ones: discarded", self._weights)
        self.begin(state)
        return None

    def begin(self, state: ControlState, *, may_receive: bool = True) -> None:
        """Begin to fetch the newest weights; not `may_receive`: from their folder."""
        self._weights = state.weights
        self._task = asyncio.create_task(self._fetch(state, may_receive), name="next-weights")
        self._task.add_done_callback(lambda _: self._inbox.post(WeightsFetched()))

    async def _fetch(self, state: ControlState, may_receive: bool) -> Fetched:
        engine = self._engine
        if may_receive and isinstance(engine, ReceivesWeights) and engine.receives_weights():
            announced = await asyncio.to_thread(self._source.announcement, state)
            if announced:
                return Fetched(Path(announced.folder), announced)
        folder = await asyncio.to_thread(self._source.fetch, state)
        if isinstance(engine, PreparesWeights):
            await engine.prepare_weights(folder, state.weights)
        return Fetched(folder, None)

    async def close(self) -> None:
        """Wait for the end of a fetch, and delete all downloads."""
        if self._task:
            await asyncio.gather(self._task, return_exceptions=True)
        await asyncio.to_thread(self._source.close)
