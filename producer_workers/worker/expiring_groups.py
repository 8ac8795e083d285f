"""Ends the groups of a worker that can serve no train step any more (I8).

The server reports them in its reply to a heartbeat. Their requests are aborted, in a frozen engine
too, until their agent loops return; a loop that does not, because it waits for its judge or a tool,
is cancelled. Then the group is released as expired, and the script decides by its tokens.

If the worker dies at any point, the leases run out and the groups wait again: those with tokens are
taken out of the queue by the janitor, the others start from their prompt.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable

from buffer.model.job import Job
from producer_workers.worker.engine_control import ControlledEngine
from producer_workers.worker.group_runner import GroupRunner
from producer_workers.worker.held_groups import PendingGroups

log = logging.getLogger("rolloutmq.worker")

CANCEL_S = 1.0
"""Seconds that an agent loop has to return after its requests were aborted."""


class DoomedGroups:
    """The groups that are being ended. Only the event loop calls it."""

    def __init__(
        self, engine: ControlledEngine, groups: PendingGroups, runner: GroupRunner
    ) -> None:
        self._engine = engine
        self._groups = groups
        self._runner = runner
        self._cancel_at: dict[Job, float] = {}

    def __bool__(self) -> bool:
        return bool(self._cancel_at)

    def add(self, jobs: Iterable[Job], now_s: float) -> bool:
        """End these jobs from the next `end` on. Return whether any of them is new.

        now_s: seconds of any clock that only moves forward.
        """
        new = set(jobs).intersection(self._groups.jobs()) - self._cancel_at.keys()
        new -= self._runner.submitting
        for job in new:
            log.info("ending a group that is too old", extra={"gid": job.gid})
            self._runner.doomed.add(job)
            self._cancel_at[job] = now_s + CANCEL_S
        return bool(new)

    async def end(self, now_s: float) -> None:
        """Abort what these jobs sample, and cancel those that did not return. Called repeatedly."""
        if not self._cancel_at:
            return
        held = set(self._groups.jobs())
        self._cancel_at = {
            job: at
            for job, at in self._cancel_at.items()
            if job in held and job not in self._runner.submitting
        }
        if not self._cancel_at:
            return
        spared = {job.gid for job in held} - {job.gid for job in self._cancel_at}
        can_abort = await self._engine.abort_others(spared)
        late = [job for job, at in self._cancel_at.items() if at <= now_s or not can_abort]
        # once: another cancellation would interrupt the release
        self._cancel_at |= dict.fromkeys(late, math.inf)
        self._groups.cancel(late)
