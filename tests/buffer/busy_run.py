"""A run with groups in every stage, and one move of each of its processes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

from buffer.control.worker_record import HeartbeatReport, WorkerState
from buffer.ids import group_id, new_nonce
from buffer.job import SampledTokens
from buffer.limits import RunLimits
from buffer.manifest import Manifest
from buffer.redis.store import Store
from buffer.run.run import Run
from buffer.wire.rollout import PolicyVersion, Status
from tests.buffer.scene import LIMITS, Scene, extend, prompt, rollout

NEWEST = PolicyVersion("l1", 4)
_LIMITS = {"max_tries": 1, "order": "fifo", "retain_batches": 1}


def busy_run(store: Store, client: Any, name: str) -> Scene:
    """A run of three tasks whose batches 1 and 2 are archived, and 3 and 4 are taken."""
    scene = Scene(store, client, name, RunLimits(**{**LIMITS.model_dump(), **_LIMITS}))
    run = scene.run
    scene.open_trainer()
    scene.enqueue(12, samples=[2] * 10 + [0, 2])
    back, ready, aborted, filtered, dead, *trained, resumed, running = scene.claim(11)
    run.jobs.release("w0", back, "handback")
    # each group has four tokens
    sampled = (SampledTokens(4, 0, 4 * n + 4, 4 * n) for n in count())
    scene.submit(aborted, status=Status.ABORTED, sampled=next(sampled))
    run.jobs.reissue(scene.producer, "math", "aborted", 1000)
    scene.submit(filtered, filtered=True, sampled=next(sampled))
    run.jobs.release("w0", dead, "failed")
    for step, job in enumerate(trained, 1):
        scene.submit(job, PolicyVersion("l1", step - 1), sampled=next(sampled))
        scene.take(step)
        if step < 3:
            run.ledger.commit(scene.trainer, step, step)
    scene.submit(ready, PolicyVersion("l1", 3), sampled=next(sampled))
    newest = PolicyVersion("l1", 3)
    scene.submit(resumed, newest, status=Status.ABORTED, sampled=next(sampled))
    scene.enqueue(2, task="code")
    scene.enqueue(2, task="quiz")
    run.control.report(scene.trainer, 3, {"rewards/mean": 0.5})
    run.buffer.put("math", [[rollout(Status.COMPLETED, PolicyVersion("l1", 3))]])
    run.control.publish_weights(scene.trainer, NEWEST, "/w/4", "sum")
    scene.worker("w1")
    scene.beat([running])
    scene.check()
    return scene


def moves(scene: Scene) -> dict[str, Callable[[], object]]:
    """One move of each process that starts on the run now, by its name."""
    parts = (_produce, _work, _train, _sweep)
    return {part.__name__.strip("_"): partial(part, scene) for part in parts}


def _produce(scene: Scene) -> None:
    run = Run.open(scene.store, scene.name)
    run.refresh_limits()
    run.control.renew_role("producer", scene.producer)
    run.read_progress()
    for task in run.limits.training_tasks:
        for status in ("aborted", "expired"):
            run.jobs.reissue(scene.producer, task, status, 1000)
        run.buffer.refresh_staleness(task)
        run.jobs.expire_waiting(task)
        cursor = run.jobs.next_draw(scene.producer, task)
        gid = group_id(task, cursor)
        run.payloads.write_prompts({gid: prompt(gid)})
        run.jobs.enqueue(scene.producer, new_nonce(), task, cursor, [2], 1000)


def _work(scene: Scene) -> None:
    run = Run.open(scene.store, scene.name)
    nonce = scene.nonces["w1"]
    pulse = HeartbeatReport(1, NEWEST, WorkerState.IDLE, tokens_per_s=1.0)
    run.fleet.heartbeat("w1", nonce, pulse, [], {})
    for job in run.jobs.claim("w1", nonce, new_nonce(), NEWEST, 8).jobs:
        group = extend(run.buffer.read(job.payload), Status.COMPLETED, NEWEST)
        run.buffer.submit("w1", job, group, 4)


def _train(scene: Scene) -> None:
    run = Run.open(scene.store, scene.name)
    nonce = new_nonce()
    run.trainers.open(nonce, step=3, lineage="l2", take_over=True)
    for step in (4, 5):
        manifest = run.ledger.take(nonce, step, {"math": 1})
        if isinstance(manifest, Manifest):
            run.buffer.load(manifest)
            run.ledger.commit(nonce, step, step - 1)


def _sweep(scene: Scene) -> None:
    Run.open(scene.store, scene.name).janitor.sweep()
