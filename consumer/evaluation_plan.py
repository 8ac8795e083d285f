"""Which weights the trainer evaluates, and how: the first, the last, and some at an interval.

[evaluation] flow    the trainer             training jobs of the workers
foreground           waits for the result    continue, behind those of the evaluation
exclusive            waits for the result    are paused: after the new weights are published, before
                                             the run continues
background           continues               continue, behind those of the evaluation; the result
                                             comes some steps later
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

from buffer.group import RolloutGroup
from buffer.manifest import NotReady
from buffer.rollout import VersionSpan
from consumer.config import TrainingConfig
from consumer.evaluation_round import EvaluationRound
from consumer.evaluator import Evaluator
from consumer.rollout_consumer import RolloutConsumer
from consumer.step_log import StepWriter

log = logging.getLogger("rolloutmq.trainer")


class EvaluationPlan:
    """Run the evaluations of one trainer.

    `start`: the step of the checkpoint that the trainer started from; evaluations of that step
    which the log contains are not repeated. `free_memory`: called while an evaluation waits for
    memory that only a checkpoint frees.

        plan = EvaluationPlan(config, consumer, writer, start, free_memory)
        plan.measure(step, last)    # after every publication
        plan.poll()                 # after every step
        plan.finish()               # at the end
    """

    def __init__(
        self,
        config: TrainingConfig,
        consumer: RolloutConsumer,
        writer: StepWriter,
        start: int,
        free_memory: Callable[[], None],
    ) -> None:
        self._config = config
        self._consumer = consumer
        self._writer = writer
        self._start = start
        self._free_memory = free_memory
        self._evaluator = Evaluator()
        self._pending: list[tuple[int, EvaluationRound]] = []
        self._started: set[tuple[str, int]] = set()

    @property
    def is_exclusive(self) -> bool:
        """Return whether training jobs are paused during an evaluation."""
        return self._config.evaluation.flow == "exclusive"

    def tasks(self, step: int, last: int) -> list[str]:
        """Return the held-out tasks that the weights of `step` are to be evaluated on now."""
        every = self._config.evaluation.every_steps
        is_due = step in (0, last) or (every is not None and step % every == 0)
        if not is_due:
            return []
        done = self._started.union(self._writer.evaluations() if step == self._start else ())
        held_out = [name for name, task in self._config.tasks.items() if task.eval_of is not None]
        return [name for name in held_out if (name, step) not in done]

    def measure(self, step: int, last: int) -> None:
        """Evaluate the newest weights, those of `step`, where this is due.

        Waits for the result, or starts the evaluation in the background.
        """
        in_background = self._config.evaluation.flow == "background" and step != last
        for task in self.tasks(step, last):
            count = self._config.evaluation_size(task)
            self._started.add((task, step))
            # one at a time: the next one would discard the groups that this one waits for
            self._finish(task)
            if in_background:
                self._pending.append((step, self._consumer.begin_evaluation(task, count)))
                continue
            groups = self._consumer.evaluate(
                task, count, waiting=log_wait_reason, checkpoint=self._free_memory
            )
            self._record(step, task, groups)

    def poll(self) -> None:
        """Record the background evaluations that have become ready."""
        for step, pending in list(self._pending):
            groups = pending.poll()
            if groups is not None:
                self._pending.remove((step, pending))
                self._record(step, pending.task, groups)

    def finish(self) -> None:
        """Wait for all background evaluations and record them."""
        for _, pending in list(self._pending):
            self._finish(pending.task)

    def _finish(self, task: str) -> None:
        for step, pending in [entry for entry in self._pending if entry[1].task == task]:
            self._pending.remove((step, pending))
            groups = self._consumer.finish_evaluation(
                pending, waiting=log_wait_reason, checkpoint=self._free_memory
            )
            self._record(step, task, groups)

    def _record(self, step: int, task: str, groups: list[RolloutGroup]) -> None:
        newest = max((span.version for span in _spans(groups)), default=step)
        metrics = self._evaluator.evaluate(groups)
        metrics["eval/newest_version"] = float(newest)
        self._writer.add_evaluation(step, task, metrics)
        log.info("evaluation finished", extra={"task": task, "step": step, **metrics})


def _spans(groups: list[RolloutGroup]) -> Iterator[VersionSpan]:
    return (span for group in groups for state in group.states for span in state.spans)


def log_wait_reason(reason: NotReady) -> None:
    """Log why a batch is not ready."""
    log.debug("%s", reason)
