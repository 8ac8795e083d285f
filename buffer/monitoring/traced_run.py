"""The parts of a run that record each call with a tracer, in place of the plain ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from buffer.groups.claim import Claim, Enqueued
from buffer.groups.job_queue import JobQueue, Serves, serving_order
from buffer.groups.submit import SubmitOutcome
from buffer.ledger.ledger import BatchLedger
from buffer.model.ids import group_id
from buffer.model.job import EndedEarly, Job, ReleaseKind, Result
from buffer.model.limits import RunLimits
from buffer.model.manifest import Manifest, NotReady
from buffer.monitoring.tracing import Tracer, now_ns, open_tracer
from buffer.redis.keys import Keys
from buffer.redis.payloads import PayloadStore
from buffer.redis.store import Store
from buffer.replay_buffer import ReplayBuffer
from buffer.rollouts.rollout import PolicyVersion
from buffer.run import Run


def trace_run(run: Run, process: str) -> Tracer | None:
    """Record what `process` does with `run`, if the environment asks for traces."""
    tracer = open_tracer(run.name, run.nonce, process)
    if tracer:
        run.jobs = TracedJobs(run.store, run.keys, run.limits, tracer)
        run.buffer = TracedBuffer(run.store, run.keys, run.limits, run.payloads, tracer)
        run.ledger = TracedLedger(run.store, run.keys, run.limits, tracer)
    return tracer


class TracedJobs(JobQueue):
    """A job queue that records enqueue, wait, claim and release."""

    def __init__(self, store: Store, keys: Keys, limits: RunLimits, tracer: Tracer) -> None:
        super().__init__(store, keys, limits)
        self._tracer = tracer

    def enqueue(
        self,
        nonce: str,
        operation: str,
        task: str,
        cursor: int,
        samples: Sequence[int],
        target: int | None,
    ) -> Enqueued:
        began = now_ns()
        done = super().enqueue(nonce, operation, task, cursor, samples, target)
        started = (draw for draw in range(cursor, done.cursor) if samples[draw - cursor])
        for draw in started if done.count else ():
            self._tracer.root(
                "enqueue", group_id(task, draw), began, samples=samples[draw - cursor]
            )
        return done

    def claim(
        self,
        worker: str,
        nonce: str,
        token: str,
        weights: PolicyVersion,
        limit: int,
        serves: Serves | None = None,
        held: Sequence[Job] = (),
    ) -> Claim:
        since = self._waiting(limit, serves, held)
        began = now_ns()
        claim = super().claim(worker, nonce, token, weights, limit, serves, held)
        for job in claim.jobs:
            if job.gid in since:  # else it arrived between the two calls
                self._tracer.past("wait", job.gid, min(since[job.gid], began), began, lane=job.lane)
            self._tracer.past(
                "claim", job.gid, began, worker=worker, tries=job.tries, weights=str(weights)
            )
        return claim

    def _waiting(self, limit: int, serves: Serves | None, held: Sequence[Job]) -> dict[str, int]:
        """Return since when (ns) the first groups of each queue have waited.

        The id of a stream's entry begins with the milliseconds of its arrival.
        """
        queues = serving_order(self._limits, serves, Counter(job.task for job in held))
        heads = [
            ("XRANGE", self._keys.jobs(task, lane), "-", "+", "COUNT", limit)
            for task, lane in queues
        ]
        found = self._store.each("heads", heads, "control")
        entries = [entry for head in found for entry in head]
        return {
            fields[b"gid"].decode(): int(entry.partition(b"-")[0]) * 1_000_000
            for entry, fields in entries
        }

    def release(
        self,
        worker: str,
        job: Job,
        kind: ReleaseKind,
        reason: str = "",
        ended: EndedEarly | None = None,
    ) -> str:
        with self._tracer.during("release", job.gid, worker=worker, kind=kind, reason=reason[:200]):
            return super().release(worker, job, kind, reason, ended)


class TracedBuffer(ReplayBuffer):
    """A replay buffer that records submit."""

    def __init__(
        self, store: Store, keys: Keys, limits: RunLimits, payloads: PayloadStore, tracer: Tracer
    ) -> None:
        super().__init__(store, keys, limits, payloads)
        self._tracer = tracer

    def submit_many(self, worker: str, results: Sequence[Result]) -> list[SubmitOutcome]:
        began = now_ns()
        outcomes = super().submit_many(worker, results)
        for result, outcome in zip(results, outcomes, strict=True):
            self._tracer.past(
                "submit",
                result.job.gid,
                began,
                worker=worker,
                tokens=result.new_tokens,
                status=str(result.group.status),
                error=str(outcome) if isinstance(outcome, Exception) else "",
            )
        return outcomes


class TracedLedger(BatchLedger):
    """A ledger that records take, train (from the end of take to the commit) and commit."""

    def __init__(self, store: Store, keys: Keys, limits: RunLimits, tracer: Tracer) -> None:
        super().__init__(store, keys, limits)
        self._tracer = tracer
        self._at_trainer: dict[int, tuple[int, list[str]]] = {}

    def take(
        self, nonce: str, step: int, counts: Mapping[str, int], *, strict: bool = True
    ) -> Manifest | NotReady:
        began = now_ns()
        answer = super().take(nonce, step, counts, strict=strict)
        if isinstance(answer, Manifest):
            for gid in answer.gids:
                self._tracer.past("take", gid, began, step=step)
            self._at_trainer[step] = now_ns(), list(answer.gids)
        return answer

    def commit(self, nonce: str, step: int, keep: int) -> None:
        began = now_ns()
        super().commit(nonce, step, keep)
        for done in sorted(self._at_trainer.keys() & set(range(step + 1))):
            taken, gids = self._at_trainer.pop(done)
            for gid in gids:
                self._tracer.past("train", gid, taken, began, step=done)
                self._tracer.past("commit", gid, began, step=done)
