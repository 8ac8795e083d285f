"""Set up a run with one task, whose groups a benchmark moves by the calls of all three sides."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks import sample
from benchmarks.server import BenchServer
from buffer.ids import group_id, new_nonce
from buffer.job import Job, Result
from buffer.limits import RunLimits, TaskLimits
from buffer.redis.keys import Keys
from buffer.run.run import Run
from buffer.wire.group import RolloutGroup
from buffer.wire.rollout import PolicyVersion

TASK = "math"
WORKER = "w0"
WEIGHTS = PolicyVersion("l0", 0)
SLICE = 64


class BenchRun:
    """One run on a benchmark's server; nothing in it ages unless a benchmark says so."""

    def __init__(self, server: BenchServer, name: str = "bench", **limits: object) -> None:
        self.server = server
        self.raw = server.raw
        self.keys = Keys(name)
        settings = RunLimits(
            **{"stale_threshold": 1000, "lease_ms": 3_600_000, **limits}, tasks={TASK: TaskLimits()}
        )
        self.run = Run.create(server.store, name, new_nonce(), settings, WEIGHTS, "/weights/0")
        self.producer = new_nonce()
        self.trainer = new_nonce()
        self.worker = new_nonce()
        self.run.control.open_producer(self.producer)
        self.run.trainers.open(self.trainer, step=0, lineage="l1")
        self.run.fleet.register(WORKER, self.worker, {"engine": "none"})

    def claim(self, count: int, shape: sample.Shape = sample.FULL) -> list[Job]:
        """Jobs of the next `count` draws, prompts included."""
        jobs: list[Job] = []
        while len(jobs) < count:
            cursor = self.run.jobs.cursor(TASK)
            size = min(SLICE, count - len(jobs))
            gids = [group_id(TASK, cursor + i) for i in range(size)]
            self.run.payloads.write_prompts({gid: sample.prompt(gid, shape) for gid in gids})
            self.run.jobs.enqueue(
                self.producer, new_nonce(), TASK, cursor, [shape.samples] * size, 10**9
            )
            jobs += self.run.jobs.claim(WORKER, self.worker, new_nonce(), WEIGHTS, size).jobs
        return jobs

    def submit(self, jobs: Sequence[Job], groups: Sequence[RolloutGroup]) -> None:
        """Submit finished groups that have piled up: many in one round trip."""
        pairs = zip(jobs, groups, strict=True)
        results = [Result(job, group, int(group.lengths.sum())) for job, group in pairs]
        for outcome in self.run.buffer.submit_many(WORKER, results):
            if isinstance(outcome, Exception):
                raise outcome

    def submit_singly(self, jobs: Sequence[Job], groups: Sequence[RolloutGroup]) -> None:
        """Submit finished groups one by one, each in a round trip of its own."""
        for job, group in zip(jobs, groups, strict=True):
            self.submit([job], [group])

    def make_ready(self, count: int, shape: sample.Shape = sample.FULL) -> None:
        """Fill the pool with `count` groups, through the scripts."""
        for _ in range(0, count, SLICE):
            jobs = self.claim(min(SLICE, count), shape)
            self.submit(jobs, [sample.group(job.gid, shape) for job in jobs])
            count -= len(jobs)

    def undo_take(self, step: int) -> None:
        """Put the last batch back into the pool, as if the step had never been taken."""
        manifest = self.run.ledger.manifest(step)
        entries = manifest.entries if manifest else ()
        keys = self.keys
        pipe = self.raw.pipeline(transaction=True)
        records = self._records([entry.gid for entry in entries])
        for entry, (arrival, version) in zip(entries, records, strict=True):
            pipe.hset(keys.group(entry.gid), "stage", "pool")
            pipe.hdel(keys.group(entry.gid), "batch")
            pipe.zadd(keys.pool(TASK, "completed"), {f"{arrival.decode()}:{entry.gid}": version})
        pipe.hincrby(keys.progress(TASK), "consumed", -len(entries))
        pipe.hincrby(keys.progress(TASK), "taken", -len(entries))
        pipe.hset(keys.ledger("train"), "taken", step - 1)
        pipe.delete(keys.batch("train", step))
        pipe.execute()

    def _records(self, gids: Sequence[str]) -> list[list[bytes]]:
        pipe = self.raw.pipeline(transaction=False)
        for gid in gids:
            pipe.hmget(self.keys.group(gid), "arrival", "version")
        rows: list[list[bytes]] = pipe.execute()
        return rows

    def check(self) -> None:
        """Check that the account adds up (I1): a benchmark of a broken run measures nothing."""
        audit = self.run.account.totals()
        if not audit.clean:
            raise AssertionError(audit.faults)
