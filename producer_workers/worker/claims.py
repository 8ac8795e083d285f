"""What a worker claims, and when.

Groups that wait for their judge need no room in the engine, but are bounded by task. `concurrency =
"auto"` finds the limit by additive increase and multiplicative decrease (as TCP): double it while
nothing queues in the engine, then add one at a time; subtract the groups that queue.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from math import ceil

from buffer.errors import RolloutMQError, StoreUnavailable
from buffer.groups.claim import Claim
from buffer.groups.job_queue import Serves
from buffer.ids import new_nonce
from buffer.job import Job
from buffer.limits import Concurrency
from buffer.redis.retry import LogOnce
from buffer.run.run import Run
from buffer.wire.rollout import PolicyVersion
from producer_workers.agent_loops.agent_loop import AgentLoop, Vacancy
from producer_workers.engines.base import EngineLoad
from producer_workers.worker.inbox import Inbox, PartEnded, Signal

log = logging.getLogger("rolloutmq.worker")

START = 8  # groups that a worker begins with

# Polls in a row that must find a queue: new requests wait for a moment in every engine.
QUEUED_POLLS = 2

FREE_FAILURES = 16  # failures in a row without a pause

LONGEST_S = 30.0  # the longest pause between claims, after some 20 more failures

REFUSALS = {
    "FULL": "the run holds as many payload bytes as it may",
    "BARRED": "the trainer could not use what this worker submitted: `rolloutmq dead` shows why; "
    "fix the cause, then run `rolloutmq resume --worker ID`",
}


class AdaptiveConcurrency:
    """Finds the `limit` of groups at which an engine is full, from `least` to `most`."""

    def __init__(self, start: int = START, least: int = 1, most: int = 1024) -> None:
        self.limit = start
        self._least = least
        self._most = most
        self._is_searching = True
        self._queued = 0

    def observe(self, load: EngineLoad, held: int) -> int:
        """Return the new limit, given the engine's load while `held` groups are sampled."""
        too_many = held * load.waiting // max(1, load.running + load.waiting)
        # above 95 % of the KV cache, an engine begins to evict requests
        self._queued = self._queued + 1 if too_many or load.kv_usage > 0.95 else 0
        # above the limit, the last decrease has not had its effect yet
        if self._queued >= QUEUED_POLLS and held <= self.limit:
            too_many = too_many or ceil(held / 8)
            self.limit = max(self._least, held // 2, held - max(1, too_many))
            self._is_searching = False
            self._queued = 0
        # a limit that is not used up is not too low
        elif not self._queued and held >= self.limit:
            self.limit = min(self._most, 2 * self.limit if self._is_searching else self.limit + 1)
        return self.limit


class FailureBackoff:
    """Pauses the claims of a worker whose tries all fail, to save the tries of the groups."""

    def __init__(self) -> None:
        self._in_row = 0
        self._until_s = 0.0

    def failed(self, now_s: float) -> None:
        """Count a failed try; `now_s` on the monotonic clock."""
        self._in_row += 1
        if (over := self._in_row - FREE_FAILURES) > 0:
            self._until_s = now_s + min(LONGEST_S, 1.2 ** min(over, 100))

    def succeeded(self) -> None:
        self._in_row = 0
        self._until_s = 0.0

    def must_pause(self, now_s: float) -> bool:
        return now_s < self._until_s


# The held groups, each with the share of its members that may need the engine, 0..1.
Shares = Mapping[Job, float]


@dataclass(eq=False)
class Claims:
    """Claims groups for one worker, under its run's limits and its own `concurrency`.

    `loops`: those of its tasks, which may limit its claims.
    """

    _run: Run
    _worker: str
    _nonce: str
    _concurrency: Concurrency
    _serves: Serves
    _loops: Collection[AgentLoop]

    def __post_init__(self) -> None:
        self.are_on_demand = any(loop.claims_on_demand for loop in self._loops)
        start = START if self._concurrency == "auto" else self._concurrency
        self._adaptive = AdaptiveConcurrency(start)
        self._problem = LogOnce(log, "claiming nothing")
        self.failures = FailureBackoff()

    def limit(self) -> int:
        wanted = self._run.limits.concurrency or self._concurrency
        return self._adaptive.limit if wanted == "auto" else wanted

    def vacancy(self, shares: Shares) -> Vacancy | None:
        """Return the room for another claim, or None."""
        if self.failures.must_pause(time.monotonic()):
            self._problem.report("every try of this worker fails, so it pauses between claims")
            return None
        limit = self.limit()
        # rounded up: most of the last group waits in the engine at first
        free = ceil(limit - sum(shares.values()))
        sampled: list[Job] = []
        behind = Counter[str]()
        for job, share in shares.items():
            if share:
                sampled.append(job)
            else:
                behind[job.task] += 1
        serves = self._serves
        for task, groups in behind.items():
            if groups > limit:
                serves = replace(serves, tasks=serves.tasks - {task})
        if free <= 0 or not serves.tasks:
            return None
        # leaves some jobs for other workers
        vacancy = Vacancy(min(free, max(1, limit // 4)), serves, sampled)
        for loop in self._loops:
            vacancy = loop.limit_claim(vacancy, len(shares))
        return vacancy

    def adapt(self, load: EngineLoad | None, shares: Shares) -> bool:
        """Adapt the limit to the engine's load. Return whether there is more room now."""
        if load is None:
            return False
        before = self._adaptive.limit
        return self._adaptive.observe(load, int(sum(shares.values()))) > before

    async def claim(self, weights: PolicyVersion, vacancy: Vacancy) -> Claim | None:
        """Return the granted claim; None if the server is unreachable."""
        try:
            claim = await asyncio.to_thread(
                self._run.jobs.claim,
                self._worker,
                self._nonce,
                new_nonce(),
                weights,
                vacancy.limit,
                vacancy.serves,
                vacancy.sampled,
            )
        except StoreUnavailable as error:
            self._problem.report(error.hint)
            return None
        self._problem.report(REFUSALS.get(claim.refusal or "", ""))
        return claim


class WakeUp:
    """Waits on a thread for a wake-up, which only a worker with a vacancy may take."""

    def __init__(self, run: Run, inbox: Inbox) -> None:
        self._run = run
        self._inbox = inbox
        self._task: asyncio.Task[None] | None = None
        self._problem = LogOnce(log, "no wake-ups")
        self.is_awaited = False

    def wait(self, timeout_s: float) -> None:
        """Post JOBS_MAY_WAIT at the wake-up, or after `timeout_s`."""
        self.is_awaited = True
        self._task = asyncio.create_task(self._wait(timeout_s))

    def cancel(self) -> None:
        if self._task:
            self._task.cancel()

    async def _wait(self, timeout_s: float) -> None:
        wake_up = self._run.keys.wake_up("workers")
        try:
            await asyncio.to_thread(self._run.store.wait, wake_up, timeout_s, shared=True)
            self._problem.report("")
        except StoreUnavailable as error:
            self._problem.report(error.hint)
        except RolloutMQError as error:
            self._inbox.post(PartEnded(error))
        finally:
            self.is_awaited = False
            self._inbox.post(Signal.JOBS_MAY_WAIT)
