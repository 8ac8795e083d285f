"""Judge in other processes: one rq job for each rollout, without blocking the engine.

    in the queue ──▶ taken ──▶ a result in the job's stream ──▶ reward
                       │            └── failed ──┐
                       └── time limit passed ────┴──▶ another try   (a new job; at last JudgeError)

Workers, work-horses and the server may lose a job, so a judge may run twice for one rollout; its
first awaited answer counts.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from math import ceil
from secrets import token_hex
from typing import Any

from rq.results import Result

from buffer.errors import JudgeError, StoreError
from buffer.failure_text import cut_text
from buffer.redis.keys import Keys
from buffer.redis.store import Store
from buffer.wire.rollout import RolloutState
from producer_workers.config.task import JudgingSection
from producer_workers.judges.judge import Judge, function_rules, rollout_fields, take_columns
from producer_workers.judges.rq_worker import FUNCTION, open_queue
from producer_workers.user_code.border import Failure, check_answers

log = logging.getLogger("rolloutmq.judge")

POLL_S = 1  # longest time between two checks of a job; a result wakes its waiter at once
GRACE_S = 5.0  # beyond its limit, until a job that has left the queue counts as lost
RESULT_S = 120  # how long a result is kept to be read
FAILURE_S = 86_400  # how long a failed job is kept to be inspected

_RAISED = f"{JudgeError.__module__}.{JudgeError.__name__}: "  # before the text of `score`'s error
_THREADS = 256  # most rollouts of a task that wait for an answer; others are not queued yet


class RqJudge(Judge):
    """Sends rollouts to the function at `name` through the judge queue of `run`.

    `store` is a server of its own, not a cluster. A group that is judged together is one job, with
    the limits of one rollout.
    """

    def __init__(
        self,
        name: str,
        store: Store,
        run: str,
        judging: JudgingSection,
        *,
        sees_group: bool = False,
    ) -> None:
        self.name = name
        self.sees_group = sees_group
        self._retrying = partial(store.retrying, "judge")
        self._judging = judging
        self._queue = open_queue(store.client, run)
        self._job_ids = Keys(run).judge_jobs
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix=f"judge-{name}")

    async def ask(self, states: Sequence[RolloutState]) -> list[dict[str, float]]:
        """Return the checked rewards. Cancelling withdraws a waiting job. Raises JudgeError."""
        stop = threading.Event()
        fields = [rollout_fields(state) for state in states]
        waiting = asyncio.get_running_loop().run_in_executor(self._threads, self._ask, fields, stop)
        try:
            answers = check_answers(self.name, await waiting, len(states))
        finally:
            stop.set()
        return take_columns(self.name, states, answers)

    def _ask(self, fields: list[dict[str, Any]], stop: threading.Event) -> Any:
        tries_left = self._judging.retries
        while True:
            try:
                return self._try(fields, stop)
            except JudgeError as error:
                if not tries_left or stop.is_set():
                    raise
                log.warning("%s; %d retries left", error.message, tries_left)
                tries_left -= 1

    def _try(self, fields: list[dict[str, Any]], stop: threading.Event) -> Any:
        """Run one job from its start to its end. Raises JudgeError."""
        try:
            return self._outcome(self._result(fields, stop))
        except (StoreError, TypeError, ValueError, RecursionError) as error:
            # The rollout cannot be written as JSON, or (RecursionError, too) the answer is invalid.
            raise JudgeError(f"judge {self.name!r} could not be asked: {error}") from error

    def _result(self, fields: list[dict[str, Any]], stop: threading.Event) -> Result:
        limits = self._judging
        job = self._queue.create_job(
            FUNCTION,
            job_id=self._job_ids + token_hex(16),
            args=(self.name, fields, limits.timeout_s, limits.memory_mb),
            timeout=ceil(limits.timeout_s),
            result_ttl=RESULT_S,
            failure_ttl=FAILURE_S,
            description=self.name,
        )
        self._retrying(lambda: self._queue.enqueue_job(job))
        status = partial(self._queue.connection.hget, job.key, "status")
        polls = 0  # without a result since the job left the queue; an outage does not count
        is_new = True
        while not stop.is_set():
            if result := self._retrying(lambda: job.latest_result(timeout=POLL_S)):
                return result
            is_waiting = self._retrying(lambda: self._queue.get_job_position(job)) is not None
            polls = 0 if is_waiting else polls + 1
            # A worker starts a job as soon as it has taken it. If it died between these two steps,
            # the job is in no queue: it is queued again, once, as there may be no worker at all.
            if is_new and polls > 1 and self._retrying(status) in (None, b"queued"):
                is_new = False
                self._retrying(lambda: self._queue.intermediate_queue.remove(job.id))
                self._retrying(lambda: self._queue.enqueue_job(job))
            if polls * POLL_S > limits.timeout_s + GRACE_S:
                raise JudgeError(f"judge {self.name!r}: job {job.id} is lost")
        if self._retrying(lambda: self._queue.get_job_position(job)) is not None:
            self._retrying(job.delete)
        raise JudgeError(f"judge {self.name!r}: cancelled")

    def _outcome(self, result: Result) -> Any:
        if result.type is Result.Type.SUCCESSFUL:
            return result.return_value
        _, is_judges, text = (result.exc_string or "").rpartition(_RAISED)
        said, _, trace = cut_text(text.strip()).partition("\n")
        reason = said if is_judges else text.strip().rpartition("\n")[2] or "no reason"
        rules = function_rules(f"judge {self.name!r}", self.name, self._judging)
        if "JobTimeoutException" in reason:
            raise rules.over_limit()
        if trace and is_judges:
            raise rules.failed(Failure(said, said, trace=trace, is_own=True))
        raise JudgeError(
            f"judge {self.name!r} failed: {reason}",
            hint=f"see job {result.job_id} in the failed registry of rq's queue {self._queue.name}",
        )
