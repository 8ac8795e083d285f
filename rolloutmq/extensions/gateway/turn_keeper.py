"""Store the turns of a group's agents; those that end during a round trip travel in the next."""

from __future__ import annotations

import asyncio
import logging

from buffer.errors import StoreUnavailable
from buffer.groups.kept_turns import KeptTurns
from buffer.job import Job
from buffer.redis.retry import LogOnce
from buffer.run.run import Run
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
        self._storing: asyncio.Task[None] | None = None  # done when all turns so far are stored
        self._outage = LogOnce(log, "turns wait until the server takes them")

    def keep(self, turn: RolloutState) -> None:
        self._waiting.append(turn)
        if len(self._waiting) == 1:  # those behind it travel with it
            self._storing = asyncio.create_task(self._store(self._storing), name="turn-keeper")
            self._storing.add_done_callback(_note_error)

    async def stored(self) -> None:
        """Wait until all turns so far are stored. Raises Fenced, WireError or StoreError."""
        if self._storing:
            await asyncio.shield(self._storing)

    async def _store(self, before: asyncio.Task[None] | None) -> None:
        if before:
            await before
        turns, self._waiting = self._waiting, []
        kept = await asyncio.to_thread(self._add, turns)
        while True:
            try:
                await asyncio.to_thread(kept.store)
            except StoreUnavailable as error:
                self._outage.report(error.hint)
            else:
                self._outage.report("")
                return

    def _add(self, turns: list[RolloutState]) -> KeptTurns:
        if self._kept is None:
            self._kept = self._run.buffer.keep_turns(self._job, self._group)
        for turn in turns:
            self._kept.add(turn)
        return self._kept


def _note_error(storing: asyncio.Task[None]) -> None:
    """Take the error of a task, which `stored` raises, so that asyncio does not log it."""
    if not storing.cancelled():
        storing.exception()
