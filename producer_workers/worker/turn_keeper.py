"""Store the turns of a group's agents; those that end during a round trip travel in the next."""

from __future__ import annotations

import asyncio
import logging

from buffer.errors import RolloutMQError, StoreUnavailable
from buffer.groups.kept_turns import KeptTurns
from buffer.job import Job
from buffer.redis.connection.retry import LogOnce
from buffer.run import Run
from buffer.wire.group import RolloutGroup
from buffer.wire.rollout import RolloutState

log = logging.getLogger("rolloutmq.worker")


class TurnKeeper:
    """Keeps the turns of one claim. While the server is unreachable or full, agents wait.

    After the first error, it stores nothing more: a turn behind a gap could not be read.
    """

    def __init__(self, run: Run, job: Job, group: RolloutGroup) -> None:
        self._run = run
        self._job = job
        self._group = group
        self._kept: KeptTurns | None = None  # made on a thread, with the first turn
        self._waiting: list[RolloutState] = []
        self._next: asyncio.Future[None] | None = None  # done when `_waiting` is stored
        self._task: asyncio.Task[None] | None = None
        self._newest: asyncio.Future[None] | None = None
        self._error: BaseException | None = None
        self._outage = LogOnce(log, "turns wait until the server takes them")

    def keep(self, turn: RolloutState) -> None:
        self._waiting.append(turn)
        if self._next is None:
            self._newest = self._next = asyncio.get_running_loop().create_future()
        if self._task is None:
            self._task = asyncio.create_task(self._store_all(), name="turn-keeper")

    async def stored(self) -> None:
        """Wait until all turns so far are stored. Raises Fenced, WireError or StoreError."""
        if self._newest:
            await asyncio.shield(self._newest)
        if self._error:
            raise self._error

    async def _store_all(self) -> None:
        try:
            while self._next:
                turns, done = self._waiting, self._next
                self._waiting, self._next = [], None
                try:
                    if not self._error:
                        await self._store(turns)
                except BaseException as error:  # agents must not get what is not stored
                    self._error = error
                    if not isinstance(error, RolloutMQError):
                        raise
                finally:
                    done.set_result(None)
        finally:
            self._task = None

    async def _store(self, turns: list[RolloutState]) -> None:
        await asyncio.to_thread(self._add, turns)
        assert self._kept is not None
        while True:
            try:
                await asyncio.to_thread(self._kept.store)
            except StoreUnavailable as error:
                self._outage.report(error.hint)
            else:
                self._outage.report("")
                return

    def _add(self, turns: list[RolloutState]) -> None:
        if self._kept is None:
            self._kept = self._run.buffer.keep_turns(self._job, self._group)
        for turn in turns:
            self._kept.add(turn)
