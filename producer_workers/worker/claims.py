"""The claims of a worker: what the server grants, and why it grants nothing, logged once."""

from __future__ import annotations

import asyncio
import logging

from buffer.errors import StoreUnavailable
from buffer.groups.claim import Claim
from buffer.model.ids import new_nonce
from buffer.redis.connection.retry import LogOnce
from buffer.rollouts.rollout import PolicyVersion
from buffer.run import Run
from producer_workers.worker.capacity import Vacancy

log = logging.getLogger("rolloutmq.worker")

REFUSALS = {
    "FULL": "the run holds as many payload bytes as it may",
    "BARRED": "the trainer could not use what this worker submitted: `rolloutmq dead` shows why; "
    "fix the cause, then run `rolloutmq resume --worker ID`",
}


class Claims:
    """Claims groups for one worker."""

    def __init__(self, run: Run, worker: str, nonce: str) -> None:
        self._run = run
        self._worker = worker
        self._nonce = nonce
        self._problem = LogOnce(log, "claiming nothing")

    async def claim(self, weights: PolicyVersion, vacancy: Vacancy) -> Claim | None:
        """Return what the server grants; None if it is unreachable."""
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
            self.report(error.hint)
            return None
        self.report(REFUSALS.get(claim.refusal or "", ""))
        return claim

    def report(self, problem: str) -> None:
        """Log, once, why nothing is claimed; "" where something can be."""
        self._problem.report(problem)
