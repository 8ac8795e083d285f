"""Submits the finished groups of one worker; those that pile up meanwhile travel together.

While the server is unreachable or full, results are kept and submitted when it is back: what was
paid for is not lost to an outage.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import NamedTuple

from buffer.errors import RolloutMQError, StoreUnavailable
from buffer.model.job import Result
from buffer.run import Run
from buffer.store.retry import SaidOnce

log = logging.getLogger("rolloutmq.worker")

MOST = 32
"""Groups in one round trip: they are encoded while the ones before them travel, and all are sent
again if the server becomes unreachable."""


class _Waiting(NamedTuple):
    result: Result
    submitted: asyncio.Future[None]


class Submitter:
    """One round trip to the server at a time, with everything that waits when it begins."""

    def __init__(self, run: Run, worker: str) -> None:
        self._run = run
        self._worker = worker
        self._waiting = deque[_Waiting]()
        self._task: asyncio.Task[None] | None = None
        self._outage = SaidOnce(log, "keeping finished groups until the server takes them")

    async def submit(self, result: Result) -> None:
        """Submit one group, however long the server is unreachable.

        Raises Fenced if its lease was lost meanwhile, WireError if it cannot be encoded.
        """
        waiting = _Waiting(result, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        if self._task is None:
            self._task = asyncio.create_task(self._submit_all(), name="submitter")
        await waiting.submitted

    async def _submit_all(self) -> None:
        try:
            while batch := self._next_batch():
                try:
                    answers = await asyncio.to_thread(self._send, [each.result for each in batch])
                except StoreUnavailable as error:
                    self._outage.say(error.hint)
                    self._waiting.extendleft(reversed(batch))
                    continue
                except Exception as error:
                    answers = [error] * len(batch)
                self._outage.say("")
                for waiting, refusal in zip(batch, answers, strict=True):
                    _resolve(waiting.submitted, refusal)
        finally:
            self._task = None

    def _next_batch(self) -> list[_Waiting]:
        batch: list[_Waiting] = []
        while self._waiting and len(batch) < MOST:
            waiting = self._waiting.popleft()
            # a group that was cancelled is not wanted any more
            if not waiting.submitted.done():
                batch.append(waiting)
        return batch

    def _send(self, results: list[Result]) -> list[Exception | None]:
        answers: list[Exception | None] = []
        for result in results:
            try:
                self._run.buffer.submit(
                    self._worker,
                    result.job,
                    result.group,
                    result.new_tokens,
                    filtered=result.filtered,
                )
                answers.append(None)
            except StoreUnavailable:
                raise
            except RolloutMQError as error:
                answers.append(error)
        return answers


def _resolve(submitted: asyncio.Future[None], refusal: Exception | None) -> None:
    if submitted.done():  # cancelled
        return
    if refusal is None:
        submitted.set_result(None)
    else:
        submitted.set_exception(refusal)
