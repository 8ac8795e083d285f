"""The groups that a worker has in work (the reference's pending set): each is started once and ended once.

Only the event loop changes it; `jobs` may be asked from any thread, as the heartbeat does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container, Coroutine
from typing import Any

from buffer.job import Job


class PendingGroups:
    """`ended` is called after each group, with what it raised. Truth value and length are those of the groups."""

    def __init__(self, ended: Callable[[BaseException | None], None]) -> None:
        self._ended = ended
        # by task, not by gid: a group that failed here may be claimed here again before its first task has ended
        self._work: dict[asyncio.Task[None], Job] = {}

    def __len__(self) -> int:
        return len(self._work)

    def jobs(self) -> list[Job]:
        return list(self._work.values())

    def schedule(self, job: Job, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work, name=job.gid)
        self._work[task] = job
        task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[None]) -> None:
        del self._work[task]
        self._ended(None if task.cancelled() else task.exception())

    def cancel(self, jobs: Container[Job]) -> list[Job]:
        """Cancel those of `jobs` that are in work; which these are."""
        found = [(task, job) for task, job in self._work.items() if job in jobs and not task.done()]
        for task, _ in found:
            task.cancel()
        return [job for _, job in found]

    async def wait(self, timeout_s: float) -> None:
        """Until all have ended, `timeout_s` at most."""
        if self._work:
            await asyncio.wait(list(self._work), timeout=timeout_s)

    async def cancel_all(self) -> list[Job]:
        """Cancel all, and wait until they have ended; those that this kept from ending by themselves."""
        left = dict(self._work)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        return [job for task, job in left.items() if task.cancelled()]
