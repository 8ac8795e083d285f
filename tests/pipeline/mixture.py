"""A run of several tasks on a real server, whose workers do only what a test makes them do."""

from __future__ import annotations

from collections.abc import Mapping

from buffer.ids import new_nonce
from buffer.job import Job
from buffer.limits import RunLimits, TaskLimits
from buffer.wire.rollout import PolicyVersion
from buffer.wire.sampling import SampleParams
from consumer.handle.batch import Batch
from consumer.handle.rollout_consumer import RolloutConsumer
from producer_workers.datasets.dataset import Problem
from producer_workers.producer.producer import Producer
from producer_workers.producer.sampler import Sampler
from producer_workers.producer.strategy import ShouldContinue, strategies_of
from tests.buffer.scene import Scene
from tests.pipeline.yard import Letters

TASKS = {"math": TaskLimits(weight=5), "code": TaskLimits(weight=2), "idle": TaskLimits(weight=0)}
LIMITS = RunLimits(tasks=TASKS, batch_size=7, steps=50)


class Rows:
    """A data set of 1,000 rows that breaks where a test says so."""

    broken: Exception | None = None

    def __len__(self) -> int:
        return 1000

    def row(self, row: int, epoch: int = 0) -> Problem:
        if self.broken:
            raise self.broken
        return Problem(messages=[{"role": "user", "content": f"{epoch} {row}"}])


class Mixture:
    """`scene` is the run seen from below; `work` is what workers would do."""

    def __init__(
        self, scene: Scene, should_continue: Mapping[str, ShouldContinue | None] | None = None
    ) -> None:
        self.scene = scene
        self.run = scene.run
        self.rows = {task: Rows() for task in self.run.limits.tasks}
        self._should_continue = should_continue
        self.manager = self.new_manager()
        self.consumer = RolloutConsumer(self.run)
        self.consumer.open()

    def new_manager(self) -> Producer:
        """As a producer that starts makes it."""
        samplers = {
            task: Sampler(task, rows, Letters(), SampleParams(), prompt_repeat_k=2)
            for task, rows in self.rows.items()
        }
        strategies = strategies_of(self.run.limits, self._should_continue)
        return Producer(self.run, samplers, strategies)

    # -- moves ---------------------------------------------------------------

    def claim(self) -> list[Job]:
        """Claim all waiting jobs; none if newer weights were published meanwhile, or in a pause."""
        weights = self.run.control.state().weights
        return self.run.jobs.claim("w0", self.scene.worker(), new_nonce(), weights, 100).jobs

    def work(self, **most: int) -> None:
        """Complete the waiting groups, at most `most` of each task, and hand the others back."""
        weights = self.run.control.state().weights
        for job in self.claim():
            if not most or most.get(job.task, 0) > 0:
                most |= {job.task: most[job.task] - 1} if most else {}
                self.scene.submit(job, weights)
            else:
                self.run.jobs.release("w0", job, "handback")

    def round(self) -> int:
        """How many groups were started."""
        return self.manager.round(self.run.control.state())

    def rounds(self, count: int = 3, **work: int) -> None:
        for _ in range(count):
            self.round()
            self.work(**work)

    def take(self, step: int) -> Batch:
        return self.consumer.take_batch(step, self.run.limits.mix().shares(step), deadline_s=400.0)

    def publish(self, step: int) -> PolicyVersion:
        weights = PolicyVersion(self.consumer.lineage, step)
        self.run.control.publish_weights(self.consumer.nonce, weights, "/w", "")
        return weights

    # -- sights --------------------------------------------------------------

    def ready(self) -> dict[str, int]:
        return {task: size.completed for task, size in self.run.buffer.count_statuses().items()}

    def stages(self, task: str = "math") -> dict[str, int]:
        """Where groups of a task are; only places that are not empty."""
        accounts = {account.task: account for account in self.run.account.totals().tasks}
        return {place: n for place, n in accounts[task].stages.items() if n}
