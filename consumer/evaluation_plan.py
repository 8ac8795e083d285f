"""Which weights the trainer evaluates, and how: the first, the last, and those after every so many steps.

[evaluation] flow    the trainer             training work of the workers
foreground           waits for the result    goes on, behind the evaluation's
exclusive            waits for the result    paused: after the new weights are out, before the run continues
background           trains on               goes on, behind the evaluation's; the result comes some steps later
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
    """Evaluations of one trainer, which began at `start`: what is in the log of that step was measured before."""

    def __init__(
        self,
        config: TrainingConfig,
        consumer: RolloutConsumer,
        writer: StepWriter,
        start: int,
        make_room: Callable[[], None],
    ) -> None:
        self._config, self._consumer, self._writer, self._start = config, consumer, writer, start
        self._make_room = make_room
        self._evaluator = Evaluator()
        self._pending: list[tuple[int, EvaluationRound]] = []
        self._begun: set[tuple[str, int]] = set()

    @property
    def is_exclusive(self) -> bool:
        return self._config.evaluation.flow == "exclusive"

    def tasks(self, step: int, last: int) -> list[str]:
        """The held-out tasks that the weights of `step` are evaluated on now."""
        every = self._config.evaluation.every_steps
        is_due = step in (0, last) or (every is not None and step % every == 0)
        held_out = [name for name, task in self._config.tasks.items() if task.eval_of is not None]
        known = self._begun.union(self._writer.evaluations() if step == self._start else ())
        return [name for name in held_out if is_due and (name, step) not in known]

    def measure(self, step: int, last: int) -> None:
        """Evaluate the newest weights, those of `step`, if they are due: wait for it, or begin in the background."""
        in_background = self._config.evaluation.flow == "background" and step != last
        for task in self.tasks(step, last):
            count = self._config.evaluation_size(task)
            self._begun.add((task, step))
            self._finish(task)  # one at a time: the next one would put away what this one waits for
            if in_background:
                self._pending.append((step, self._consumer.begin_evaluation(task, count)))
            else:
                groups = self._consumer.evaluate(task, count, waiting=say_why, checkpoint=self._make_room)
                self._note(step, task, groups)

    def poll(self) -> None:
        """Note what has become ready of evaluations in the background."""
        for step, pending in list(self._pending):
            if (groups := pending.poll()) is not None:
                self._pending.remove((step, pending))
                self._note(step, pending.task, groups)

    def finish(self) -> None:
        """Wait for all that is under way."""
        for _, pending in list(self._pending):
            self._finish(pending.task)

    def _finish(self, task: str) -> None:
        for step, pending in [found for found in self._pending if found[1].task == task]:
            self._pending.remove((step, pending))
            groups = self._consumer.finish_evaluation(pending, waiting=say_why, checkpoint=self._make_room)
            self._note(step, task, groups)

    def _note(self, step: int, task: str, groups: list[RolloutGroup]) -> None:
        newest = max((span.version for span in _spans(groups)), default=step)
        metrics = self._evaluator.evaluate(groups) | {"eval/newest_version": float(newest)}
        self._writer.add_evaluation(step, task, metrics)
        log.info("evaluated", extra={"task": task, "step": step, **metrics})


def _spans(groups: list[RolloutGroup]) -> Iterator[VersionSpan]:
    return (span for group in groups for state in group.states for span in state.spans)


def say_why(reason: NotReady) -> None:
    log.debug("%s", reason)
