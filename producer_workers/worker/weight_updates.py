"""The next weights on their way to the engine, while it still samples with the old ones.

A trainer announces weights before it pauses the run to publish them, so that the pause holds the
switch only. They are fetched, verified and, where the engine can, read into a second buffer, one
version at a time: a worker that misses versions meanwhile continues with the newest. Nothing here
touches the weights that the engine runs.

    the fetch        the version that is wanted    then
    is under way     the same                      wait for its end
                     another one                   wait, discard it, fetch the other one
    has ended        the same                      keep it until it is published
                     another one                   discard it, fetch the other one
    failed           the same                      refused (engine_control.py), fetched again later
                     another one                   fetch the other one: the first may be deleted
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import NamedTuple

from buffer.control.control import LocatedWeights
from buffer.errors import StoreUnavailable, WireError
from buffer.run import Run
from buffer.weights.announcement import Announcement
from buffer.weights.registry import open_receiver
from buffer.weights.transport import PublishedWeights
from producer_workers.engines.base import Engine, PreparesWeights, ReceivesWeights, WeightsError
from producer_workers.worker.inbox import Inbox, WeightsFetched

log = logging.getLogger("rolloutmq.worker")


class WeightSource:
    """Finds the weights that a control state names. Lookups raise WeightsError."""

    def __init__(self, run: Run) -> None:
        self._receiver = open_receiver(run.store, run.keys)

    def announcement(self, found: LocatedWeights) -> Announcement | None:
        """Return how engines get these weights from the trainer's memory, if they can."""
        try:
            return self._receiver.announcement(PublishedWeights(found.path, found.checksum))
        except (OSError, WireError, StoreUnavailable) as error:
            message = f"cannot read the announcement of the weights {found.weights}: {error}"
            raise WeightsError(message) from error

    def fetch(self, found: LocatedWeights) -> Path:
        """Return a folder with these weights, verified. Without a checksum, nothing is verified."""
        try:
            return self._receiver.fetch(PublishedWeights(found.path, found.checksum))
        except (OSError, WireError, StoreUnavailable) as error:
            raise WeightsError(f"cannot use the weights in {found.path}: {error}") from error

    def keep_only(self, folder: Path) -> None:
        """Delete downloads other than `folder`, which the engine now runs."""
        self._receiver.keep_only(folder)

    def close(self) -> None:
        """Delete all downloads."""
        self._receiver.close()


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
        self._wanted: LocatedWeights | None = None
        self._task: asyncio.Task[Fetched] | None = None

    def has(self, wanted: LocatedWeights) -> bool:
        """Return whether these weights are there; begin to fetch them if need be.

        Raises the error that ended the fetch: WeightsError, EngineDeadError.
        """
        if self._task is None:
            self.begin(wanted)
        elif self._task.done():
            failed = self._task.exception()
            if self._wanted != wanted:
                log.debug("weights %s are replaced by others", self._wanted)
                self.begin(wanted)
            elif failed:
                self._task = None
                raise failed
            else:
                return True
        return False

    def take(self, wanted: LocatedWeights) -> Fetched | None:
        """Return the weights, and forget them, once `has` returns that they are there."""
        if not self.has(wanted):
            return None
        assert self._task
        fetched = self._task.result()
        self._task = None
        return fetched

    def begin(self, wanted: LocatedWeights, *, may_receive: bool = True) -> None:
        """Begin to fetch weights; not `may_receive`: from their folder."""
        self._wanted = wanted
        self._task = asyncio.create_task(self._fetch(wanted, may_receive), name="next-weights")
        self._task.add_done_callback(lambda _: self._inbox.post(WeightsFetched()))

    async def _fetch(self, wanted: LocatedWeights, may_receive: bool) -> Fetched:
        engine = self._engine
        if may_receive and isinstance(engine, ReceivesWeights) and engine.receives_weights():
            announced = await asyncio.to_thread(self._source.announcement, wanted)
            if announced:
                return Fetched(Path(announced.folder), announced)
        folder = await asyncio.to_thread(self._source.fetch, wanted)
        if isinstance(engine, PreparesWeights):
            await engine.prepare_weights(folder, wanted.weights)
        return Fetched(folder, None)

    async def close(self) -> None:
        """Wait for the end of a fetch, and delete all downloads."""
        if self._task:
            await asyncio.gather(self._task, return_exceptions=True)
        await asyncio.to_thread(self._source.close)
