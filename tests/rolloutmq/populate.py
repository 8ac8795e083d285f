"""A small run in which every place of a group is taken by at least one."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any, cast

import numpy as np
import orjson

from buffer.control.worker_record import HeartbeatReport, WorkerRecord, WorkerState
from buffer.ids import group_id, new_nonce
from buffer.job import Job, PayloadRef
from buffer.limits import RunLimits, TaskLimits
from buffer.manifest import Manifest
from buffer.redis.store import Store
from buffer.run.run import Run
from buffer.wire import group_bytes
from buffer.wire.group import RolloutGroup
from buffer.wire.rollout import PolicyVersion, RolloutState, Status, VersionSpan
from consumer.grpo.reporting.metric_writers import SampleWriter
from consumer.handle.sample_log import TokenTexts, describe_sample
from consumer.handle.sample_tokens import pack

WEIGHTS = PolicyVersion("l0", 0)
ESCAPE = "\x1b[31mred\x1b[0m"
"""What a model might write to steer a terminal."""


class Scene:
    """A run and the nonces of everybody in it."""

    def __init__(self, store: Store, name: str, task: str = "math", **limits: object) -> None:
        self.task = task
        tasks = {task: TaskLimits(), "exam": TaskLimits(eval_of=task)}
        settings = {
            "stale_threshold": 2,
            "max_tries": 1,
            "lease_ms": 600_000,
            "role_timeout_ms": 600_000,
        } | limits
        self.run = Run.create(
            store,
            name,
            new_nonce(),
            RunLimits.model_validate({"tasks": tasks} | settings),
            WEIGHTS,
            "/weights/0",
        )
        self.producer = new_nonce()
        self.trainer = new_nonce()
        self.workers: dict[str, str] = {}
        self.running: Job
        self.taken: PayloadRef

    def enqueue(self, groups: int, prompt: int = 3, source: str | None = None) -> None:
        for first in range(0, groups, 128):
            self._enqueue(min(groups - first, 128), prompt, source)

    def _enqueue(self, groups: int, prompt: int, source: str | None) -> None:
        run = self.run
        start = self.run.jobs.cursor(self.task)
        states = [
            RolloutState(
                index=i,
                messages=[{"role": "user", "content": "What is 1 + 1?"}],
                prompt_ids=range(1, prompt + 1),
                data_source=source,
            )
            for i in range(2)
        ]
        gids = [group_id(self.task, start + i) for i in range(groups)]
        run.payloads.write_prompts(
            {gid: group_bytes.encode(RolloutGroup(gid, self.task, states)) for gid in gids}
        )
        run.control.open_producer(self.producer)
        run.jobs.enqueue(self.producer, new_nonce(), self.task, start, [2] * groups, start + groups)

    def join(self, worker: str) -> None:
        self.workers[worker] = new_nonce()
        self.run.fleet.register(worker, self.workers[worker], {"engine": "simulated"})
        self.beat(worker, ack=1)

    def beat(
        self, worker: str, *, ack: int, state: WorkerState = WorkerState.IDLE, judging: int = 0
    ) -> None:
        pulse = HeartbeatReport(
            ack, WEIGHTS, state, tokens_per_s=120.0, done=4, concurrency=8, judging=judging, judged=40, judging_ms=8000,
            judge_failures=3, judge_buckets=(0, 0, 0, 10, 29, 0, 0, 1, 0, 0, 0, 0, 0, 0),
        )  # fmt: skip
        self.run.fleet.heartbeat(worker, self.workers[worker], pulse, [])

    def claim(self, worker: str, limit: int) -> list[Job]:
        return self.run.jobs.claim(worker, self.workers[worker], new_nonce(), WEIGHTS, limit).jobs

    def submit(
        self,
        worker: str,
        job: Job,
        status: Status = Status.COMPLETED,
        *,
        filtered: bool = False,
        finish: str = "stop",
    ) -> None:
        group = self.run.buffer.read(job.payload)
        for place, state in enumerate(group.states):
            spans = [VersionSpan(0, 2, 0, "l0"), VersionSpan(2, 1, 1, "l0")]
            state.append(np.array([5, 6, 7], "<i4"), np.array([-0.1, -0.2, -0.3], "<f4"), spans)
            state.response = f"It is {ESCAPE} 2."
            state.status = status
            state.finish_reason = finish
            state.reward = {"score": float(place), "length": 3.0}
        group = RolloutGroup(job.gid, job.task, group.states)
        self.run.buffer.submit(worker, job, group, 6, filtered=filtered)

    def write_as(self, worker: str, job: Job, states: list[RolloutState]) -> None:
        """Hand in what a worker made, whatever it is."""
        for state in states:
            state.append(
                np.array([5], "<i4"), np.array([-0.1], "<f4"), [VersionSpan(0, 1, 0, "l0")]
            )
            state.status = Status.COMPLETED
            state.finish_reason = "stop"
        self.run.buffer.submit(worker, job, RolloutGroup(job.gid, job.task, states), 2)

    def open_trainer(self) -> None:
        self.run.trainers.open(self.trainer, step=0, lineage="l1")


def populate(store: Store, name: str = "demo") -> Scene:
    """12 groups of `math`: 2 archived, 1 taken, 1 ready, 1 aborted, 1 dead, 1 filtered, 1 running,
    4 waiting.
    """
    scene = Scene(store, name)
    scene.enqueue(12)
    scene.join("w0")
    scene.join("w1")
    jobs = scene.claim("w0", 8)
    for job in jobs[:4]:
        scene.submit("w0", job)
    scene.submit("w0", jobs[4], Status.ABORTED)
    scene.run.jobs.release("w0", jobs[5], "failed", "ValueError: the judge said no")
    scene.submit("w0", jobs[6], filtered=True)
    scene.running = jobs[7]
    scene.open_trainer()
    for step, groups in ((1, 2), (2, 1)):
        manifest = scene.run.ledger.take(scene.trainer, step, {"math": groups})
        assert isinstance(manifest, Manifest)
        scene.taken = manifest.entries[0].payload
    scene.run.ledger.commit(scene.trainer, 1, 1)
    return scene


def populate_as_documented(store: Store) -> Scene:
    """The run of docs/pages/commands.md: 60 groups, 7 steps of 6 taken, one dead, some running."""
    scene = Scene(store, "demo", task="chain_sum", stale_threshold=20)
    scene.enqueue(60)
    scene.join("worker-0")
    jobs = scene.claim("worker-0", 52)
    for job in jobs[:48]:
        scene.submit("worker-0", job)
    scene.run.jobs.release("worker-0", jobs[48], "failed", "ValueError: the judge said no")
    scene.open_trainer()
    for step in range(1, 8):
        assert isinstance(scene.run.ledger.take(scene.trainer, step, {"chain_sum": 6}), Manifest)
    return scene


def forge(scene: Scene, text: str) -> None:
    """A text of a hostile worker wherever the keys that it may write hold one."""
    keys = scene.run.keys
    client = cast(Any, scene.run.store.client)
    for worker in client.zrange(keys.workers, 0, -1):
        names = {field.name for field in fields(WorkerRecord)} | {"host", "surprise"}
        # but for those without which it would be silent
        client.hset(
            keys.worker(worker.decode()),
            mapping=dict.fromkeys(names - {"seen_ms"} | {"report"}, text),
        )
    for gid in client.zrange(keys.dead, 0, -1):
        letter = {"reason": text, "worker": text, "try": 1}
        client.set(keys.dead_letter(gid.decode()), orjson.dumps(letter))
    client.delete(keys.events)
    for _ in range(12):
        client.xadd(keys.events, {"event": text, text: text})
    for gid in ("math-0000000003", "math-0000000004"):
        client.hset(keys.group(gid), mapping={"owner": text, "lineage": text})


def write_samples(scene: Scene, folder: Path, text: str = "") -> None:
    """The sample log of step 1, whose groups are archived; `text` is what the models said."""
    gids = [group_id("math", draw) for draw in (0, 1)]
    write_steps(folder, [(1, "l1", gids)])
    states = scene.run.buffer.read(scene.taken).states
    writer = SampleWriter(folder, 2**30, 1)
    samples = []
    for gid, why in zip(gids, ("best", "worst"), strict=True):
        for state in states:
            state.response = text or f"It was {why}."
        group = RolloutGroup(gid, "math", states)
        scores = {"trainer": group.logprobs - 0.25, "entropy": np.full_like(group.logprobs, 1.75)}
        packed = pack(scores, group.lengths, 2)
        samples.append(describe_sample(group, 1, why, 0, TokenTexts([]), tokens=2, scores=packed))
    writer.write_samples(1, samples)
    writer.close()


def write_steps(folder: Path, steps: list[tuple[int, str, list[str]]]) -> Path:
    path = folder / "steps.jsonl"
    lines = [
        {
            "step": step,
            "lineage": lineage,
            "gids": gids,
            "metrics": {"rewards/mean": step / 10, "time/step_s": 1.5},
        }
        for step, lineage, gids in steps
    ]
    path.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
    return path
