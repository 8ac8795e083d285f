"""The groups that a worker holds (the reference's pending set), and what spares or ends them."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Container, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import takewhile
from typing import Any, TypeVar

from buffer.job import Job
from buffer.limits import RunLimits
from buffer.wire.rollout import PolicyVersion, RolloutState, has_ended
from producer_workers.work_time import LimitedWork
from producer_workers.worker.inbox import Inbox, PartEnded, Signal
from producer_workers.worker.shared_engine import SharedEngine

log = logging.getLogger("rolloutmq.worker")
T = TypeVar("T")


class HeldGroups:
    """The running groups of one worker; each starts once and ends once, as a PartEnded.

    Only the event loop changes it; any thread may call `jobs`, `judging` and `oldest`. `members`:
    as the agent loop has them now. `submitting`: jobs whose last call is under way; the server may
    have ended their leases because that call arrived. `expiring`, `late`: jobs to release, as
    expired or as over their time limit, once they are aborted or cancelled.
    """

    def __init__(self, inbox: Inbox, engine: SharedEngine) -> None:
        self._inbox = inbox
        self._engine = engine
        # in order of claims; a group that failed may be claimed again before its first asyncio task
        # has ended
        self._running: dict[asyncio.Task[None], Job] = {}
        self.members: dict[Job, list[RolloutState]] = {}
        self.submitting: set[Job] = set()
        self.expiring: set[Job] = set()
        self.late: set[Job] = set()
        self._cancel_at: dict[Job, float] = {}

    def __len__(self) -> int:
        return len(self._running)

    def jobs(self) -> list[Job]:
        return list(self._running.values())

    def start(self, job: Job, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work, name=job.gid)
        self._running[task] = job
        task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[None]) -> None:
        del self._running[task]
        self._inbox.post(PartEnded(None if task.cancelled() else task.exception()))

    async def wait_for_earlier(self, job: Job) -> None:
        """Wait for the ends of earlier claims of the group: the engine knows requests by gid."""
        if earlier := self._earlier(job):
            await asyncio.wait(earlier)

    def _earlier(self, job: Job) -> list[asyncio.Task[None]]:
        before = takewhile(lambda held: held[1] is not job, self._running.items())
        return [task for task, other in before if other.gid == job.gid]

    def forget(self, job: Job) -> None:
        """Drop what is known of a group that ends now."""
        self.submitting.discard(job)
        self.expiring.discard(job)
        self.late.discard(job)
        self.members.pop(job, None)
        if not self._earlier(job):
            self._engine.forget(job.gid)

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

    # -- figures -------------------------------------------------------------

    def figure(self, job: Job, compute: Callable[[Sequence[RolloutState]], T], fallback: T) -> T:
        """Return `compute(members)`, or `fallback` if a user's loop has put rubbish into them."""
        try:
            return compute(self.members.get(job, ()))
        except Exception:  # any field of a member may be anything
            return fallback

    def shares(self) -> dict[Job, float]:
        """Return the share of members that may need the engine; 1 until the payload is read."""

        def open_share(members: Sequence[RolloutState]) -> float:
            left = len(members) - sum(map(has_ended, members))
            return left / len(members) if members else 1.0

        return {job: self.figure(job, open_share, 1.0) for job in self.jobs()}

    def judging(self) -> int:
        """Return how many groups only wait for their judges."""

        def is_sampled(members: Sequence[RolloutState]) -> bool:
            return bool(members) and all(map(has_ended, members))

        running = [job for job in [*self.members] if job not in self.submitting]
        return sum(self.figure(job, is_sampled, False) for job in running)

    def oldest(self, jobs: Iterable[Job]) -> dict[Job, PolicyVersion]:
        """Return the oldest weights of each group that has tokens."""
        found = {}
        for job in jobs:
            began = self._engine.first_weights(job.gid)
            if weights := self.figure(job, partial(_oldest_weights, began), began):
                found[job] = weights
        return found

    # -- groups that are ended: too old for every train step (I8), or over their time limit ------

    @property
    def are_ending(self) -> bool:
        return bool(self._cancel_at)

    def expire(self, jobs: Iterable[Job]) -> bool:
        """End these jobs from the next `end_some` on. Return whether any is new.

        If the worker dies meanwhile, the leases run out, and the janitor expires the groups that
        have tokens.
        """
        new = set(jobs).intersection(self.jobs()) - self._cancel_at.keys() - self.submitting
        for job in new:
            log.info("ending a group that is too old", extra={"gid": job.gid})
        self.expiring |= new
        self._end_soon(new)
        return bool(new)

    @contextmanager
    def time_limit(self, job: Job, limit_s: float | None) -> Iterator[None]:
        """End a job, as `expire` does, that has worked in the block for `limit_s` seconds."""

        def end() -> None:
            if job not in self._cancel_at:
                self.late.add(job)
                self._end_soon([job])
                self._inbox.post(Signal.GROUP_IS_LATE)

        with LimitedWork(limit_s or 0.0, end if limit_s else None, job.gid):
            yield

    def _end_soon(self, jobs: Iterable[Job]) -> None:
        # seconds for an agent loop to return after its requests were aborted
        self._cancel_at |= dict.fromkeys(jobs, time.monotonic() + 1.0)

    async def end_some(self) -> None:
        """Abort what these jobs sample, also in a frozen engine; cancel loops that do not return.

        Called repeatedly. Then the groups release themselves. Aborted first, since only what an
        engine returns is known and counted.
        """
        if not self._cancel_at:
            return
        held = set(self.jobs())
        ending = self._cancel_at.keys() & held - self.submitting
        self._cancel_at = {job: at for job, at in self._cancel_at.items() if job in ending}
        if not ending:
            return
        can_abort = await self._engine.abort_groups_but({job.gid for job in held - ending})
        now_s = time.monotonic()
        late = [job for job, at in self._cancel_at.items() if at <= now_s or not can_abort]
        # once: another cancellation would interrupt the release
        self._cancel_at |= dict.fromkeys(late, math.inf)
        self.cancel(late)


def _oldest_weights(
    began: PolicyVersion | None, states: Iterable[RolloutState]
) -> PolicyVersion | None:
    """Return the oldest weights in the tokens of a group, an abandoned lineage before its fork."""
    oldest: PolicyVersion | None = None
    for state in states:
        for span in state.spans[:1]:
            if oldest is None or span.version < oldest.version:
                oldest = PolicyVersion(span.lineage, span.version)
    if began and (oldest is None or began.version < oldest.version):
        return began
    return oldest


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
        spared = set[str]()
        for job in jobs if now_s < self._ends_s else ():
            most = self._limits.tail_tries(job.task)
            if most is not None and job.aborts >= most:
                spared.add(job.gid)
        return spared
