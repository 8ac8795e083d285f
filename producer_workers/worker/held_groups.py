"""The groups that a worker holds (the reference's pending set), and what spares or ends them."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Container, Coroutine, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from buffer.job import Job
from buffer.limits import RunLimits
from producer_workers.worker.group_runner import GroupRunner
from producer_workers.worker.inbox import GroupFinished, Inbox
from producer_workers.worker.shared_engine import SharedEngine

log = logging.getLogger("rolloutmq.worker")

CANCEL_S = 1.0  # seconds for an agent loop to return after its requests were aborted


class HeldGroups:
    """The running groups of one worker; each starts once and ends once, as a GroupFinished.

    Only the event loop changes it; any thread may call `jobs`.
    """

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox
        # by asyncio task, not by gid: a group that failed may be claimed again before its first
        # asyncio task has ended
        self._running: dict[asyncio.Task[None], Job] = {}

    def __len__(self) -> int:
        return len(self._running)

    def jobs(self) -> list[Job]:
        return list(self._running.values())

    def start(self, job: Job, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work, name=job.gid)
        self._running[task] = job
        task.add_done_callback(partial(self._end, job))

    def _end(self, job: Job, task: asyncio.Task[None]) -> None:
        del self._running[task]
        self._inbox.post(GroupFinished(job, None if task.cancelled() else task.exception()))

    def cancel(self, jobs: Container[Job]) -> list[Job]:
        """Cancel the given jobs and return those that were running."""
        cancelled = []
        for task, job in self._running.items():
            if job in jobs and not task.done():
                task.cancel()
                cancelled.append(job)
        return cancelled

    async def cancel_all(self) -> list[Job]:
        """Cancel all jobs, wait for their ends, and return those that did not end by themselves."""
        left = dict(self._running)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        return [job for task, job in left.items() if task.cancelled()]


class Protection:
    """Chooses the groups that an abort does not interrupt yet.

    A group that was interrupted `tail_batch_max_tries` times finishes: a slow response would never
    end. The abort waits for half of `pause_timeout_s`; after all of it, the worker would be fenced.
    """

    def __init__(self, limits: RunLimits) -> None:
        self._limits = limits
        self._epoch = 0
        self._ends_s = 0.0

    def spared(self, epoch: int, jobs: Iterable[Job], now_s: float) -> set[str]:
        """Return the gids that the abort of `epoch` must not interrupt at monotonic `now_s`."""
        if epoch != self._epoch:
            self._epoch = epoch
            self._ends_s = now_s + self._limits.pause_timeout_s / 2
        if now_s >= self._ends_s:
            return set()
        return {job.gid for job in jobs if self._is_protected(job)}

    def _is_protected(self, job: Job) -> bool:
        most = self._limits.tail_tries(job.task)
        return most is not None and job.aborts >= most


@dataclass(eq=False)
class ExpiringGroups:
    """Ends the groups that can serve no train step any more (I8). Only the event loop calls it.

    It aborts their requests, also in a frozen engine, and cancels loops that do not return; then
    the worker releases the groups as expired. If the worker dies meanwhile, the leases run out, and
    the janitor expires the groups that have tokens.
    """

    _engine: SharedEngine
    _groups: HeldGroups
    _runner: GroupRunner
    _cancel_at: dict[Job, float] = field(default_factory=dict, init=False)

    def __bool__(self) -> bool:
        return bool(self._cancel_at)

    def add(self, jobs: Iterable[Job], now_s: float) -> bool:
        """Expire these jobs from the next `end` on. Return whether any is new."""
        new = set(jobs).intersection(self._groups.jobs()) - self._cancel_at.keys()
        new -= self._runner.submitting
        for job in new:
            log.info("ending a group that is too old", extra={"gid": job.gid})
            self._runner.expiring.add(job)
            self._cancel_at[job] = now_s + CANCEL_S
        return bool(new)

    async def end(self, now_s: float) -> None:
        """Abort what these jobs sample, cancel late jobs. Called repeatedly."""
        if not self._cancel_at:
            return
        held = set(self._groups.jobs())
        ending = self._cancel_at.keys() & held - self._runner.submitting
        self._cancel_at = {job: at for job, at in self._cancel_at.items() if job in ending}
        if not self._cancel_at:
            return
        spared = {job.gid for job in held} - {job.gid for job in self._cancel_at}
        can_abort = await self._engine.abort_groups_but(spared)
        late = [job for job, at in self._cancel_at.items() if at <= now_s or not can_abort]
        # once: another cancellation would interrupt the release
        self._cancel_at |= dict.fromkeys(late, math.inf)
        self._groups.cancel(late)
