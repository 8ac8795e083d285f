"""Submit the finished groups of one worker, many in a round trip."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import NamedTuple

from buffer.errors import StoreUnavailable
from buffer.groups.submit import GROUPS_PER_TRIP, Stored, SubmitOutcome
from buffer.job import Result
from buffer.redis.retry import LogOnce
from buffer.run.run import Run

log = logging.getLogger("rolloutmq.worker")


class _Waiting(NamedTuple):
    result: Result
    submitted: asyncio.Future[Stored]


class Submitter:
    """Submits finished groups; those that pile up during a round trip travel in the next.

    While the server is unreachable or full, the worker keeps results. A thread checks, encodes and
    sends them, because the event loop feeds the engine. If the worker dies before the script of a
    group runs, its bytes are dropped or expire, its lease runs out, and another worker generates it
    again; after it, the group is in its pool.
    """

    def __init__(self, run: Run, worker: str) -> None:
        self._run = run
        self._worker = worker
        self._waiting = deque[_Waiting]()
        self._task: asyncio.Task[None] | None = None
        self._outage = LogOnce(log, "keeping finished groups until the server takes them")

    async def submit(self, result: Result) -> None:
        """Submit one group, however long the server is unreachable. Raises Fenced, WireError."""
        waiting = _Waiting(result, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        if self._task is None:
            self._task = asyncio.create_task(self._submit_all(), name="submitter")
        await waiting.submitted

    async def _submit_all(self) -> None:
        try:
            while batch := self._next_batch():
                try:
                    results = [each.result for each in batch]
                    outcomes: list[SubmitOutcome] = await asyncio.to_thread(
                        self._run.buffer.submit_many, self._worker, results
                    )
                except StoreUnavailable as error:
                    self._outage.report(error.hint)
                    self._waiting.extendleft(reversed(batch))
                    continue
                except Exception as error:  # of an observer; no group may wait for ever
                    outcomes = [error] * len(batch)
                self._outage.report("")
                for (_, submitted), outcome in zip(batch, outcomes, strict=True):
                    if submitted.done():  # the group was cancelled
                        continue
                    if isinstance(outcome, Exception):
                        submitted.set_exception(outcome)
                    else:
                        submitted.set_result(outcome)
        finally:
            self._task = None

    def _next_batch(self) -> list[_Waiting]:
        batch: list[_Waiting] = []
        while self._waiting and len(batch) < GROUPS_PER_TRIP:
            waiting = self._waiting.popleft()
            # a group that was cancelled is not wanted any more
            if not waiting.submitted.done():
                batch.append(waiting)
        return batch
