"""The groups that a worker has in work (the reference's pending set): each is started once and
ended once.

Only the event loop changes it; `jobs` may be asked from any thread, as the heartbeat does.

Groups that a pause waits for, because they were interrupted too often already
(`tail_batch_max_tries`).

Without it, a response that takes longer than the time between two updates starts again for ever.
With it, it is made under weights that grow old meanwhile, and its pause is as long as it takes, up
to a bound.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container, Coroutine, Iterable
from typing import Any

from buffer.model.job import Job
from buffer.model.limits import RunLimits


class PendingGroups:
    """`ended` is called after each group, with what it raised. Truth value and length are those of
    the groups.
    """

    def __init__(self, ended: Callable[[BaseException | None], None]) -> None:
        self._ended = ended
        # by task, not by gid: a group that failed here may be claimed here again before its first
        # task has ended
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
        """Cancel all, and wait until they have ended; those that this kept from ending by
        themselves.
        """
        left = dict(self._work)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        return [job for task, job in left.items() if task.cancelled()]


class Protection:
    """For one worker. An abort of one control epoch waits for half of `pause_timeout_s`: who waited
    for the whole of it would be fenced, and lose everything that it holds.
    """

    def __init__(self, limits: RunLimits) -> None:
        self._limits = limits
        self._epoch = 0
        self._ends_s = 0.0

    def spared(self, epoch: int, jobs: Iterable[Job], now_s: float) -> set[str]:
        """The gids that the abort of `epoch` shall not interrupt now. `now_s`: any clock that only
        goes forward.
        """
        if epoch != self._epoch:
            self._epoch = epoch
            self._ends_s = now_s + self._limits.pause_timeout_s / 2
        if now_s >= self._ends_s:
            return set()
        return {job.gid for job in jobs if self._is_protected(job)}

    def _is_protected(self, job: Job) -> bool:
        most = self._limits.tail_tries(job.task)
        return most is not None and job.aborts >= most
