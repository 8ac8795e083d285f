"""A run with groups in all stages whose processes are gone, and the trainer that continues it."""

from __future__ import annotations

from buffer.errors import WireError
from buffer.manifest import Manifest
from buffer.wire.rollout import PolicyVersion, Status
from tests.buffer.checkpointing import Trainer
from tests.buffer.scene import Scene

DRAWS = 12


class Story:
    """A run with groups of two tasks in all stages, and a trainer with checkpoints."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.trainer = Trainer(scene)
        for task in ("math", "code"):
            scene.enqueue(DRAWS, task=task, samples=[2] * (DRAWS - 1) + [0])
        jobs = {job.gid: job for job in scene.claim(2 * DRAWS - 2)}
        for task in ("math", "code"):
            own = [job for gid, job in jobs.items() if gid.startswith(task)]
            aborted, filtered, dead, back, running, *ready = own
            scene.submit(aborted, status=Status.ABORTED)
            scene.submit(filtered, filtered=True)
            scene.run.jobs.release("w0", dead, "failed")
            scene.run.jobs.release("w0", back, "handback")
            for job in ready:
                scene.submit(job)
            assert running
        for step in (1, 2, 3):
            self.trainer.train(step, math=1, code=1)
        self.trainer.save(keep=2)
        scene.take(4, math=1, code=1)
        scene.run.janitor.sweep()
        scene.check()
        self.leave()

    def leave(self) -> None:
        """All processes of the run are gone for long."""
        scene = self.scene
        scene.raw.hset(scene.keys.control, mapping={"trainer_seen_ms": 1, "producer_seen_ms": 1})
        scene.raw.zadd(scene.keys.workers, dict.fromkeys(("w0", "w1"), 1))
        scene.nonces.clear()
        scene.producer = ""

    def ready(self, task: str) -> list[str]:
        return [gid for gid, _ in self.scene.pool("completed", task)]

    def finish(self, steps: int = 9) -> None:
        """Train to the last step; `Position.add` raises where a group is trained twice."""
        scene = self.scene
        self.trainer.open(self.trainer.checkpoints[3])
        scene.run.control.publish_weights(scene.trainer, PolicyVersion("l1", 4), "/w/4", "sum")
        for step in range(4, steps + 1):
            while not self._train(step):
                self._produce(PolicyVersion("l1", 4))
            self.trainer.save()
        scene.check()

    def _train(self, step: int) -> bool:
        answer = self.scene.run.ledger.take(self.scene.trainer, step, {"math": 1, "code": 1})
        if not isinstance(answer, Manifest):
            return False
        self.trainer.position.add(answer)
        return True

    def _produce(self, weights: PolicyVersion) -> None:
        scene = self.scene
        for task in ("math", "code"):
            scene.run.jobs.reissue(scene.producer or scene.open_producer(), task, "aborted", 1000)
            scene.run.jobs.next_draw(scene.producer, task)
            scene.enqueue(2, task=task)
        for job in scene.claim(8, weights=weights):
            try:
                scene.submit(job, weights)
            except WireError:  # the bytes are of another group
                scene.run.jobs.release("w0", job, "failed")
