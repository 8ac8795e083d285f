"""Which weights the trainer evaluates, and how: the first, the last, and some at an interval.

[evaluation] flow    the trainer             training jobs of the workers
foreground           waits for the result    continue, behind those of the evaluation
exclusive            waits for the result    are paused after the weights are published
background           continues               continue, behind those of the evaluation
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from math import comb

import numpy as np
from numpy.typing import NDArray

from buffer.manifest import NotReady
from buffer.wire.group import RolloutGroup
from consumer.config.trainer import TrainingConfig
from consumer.grpo.learner.group_rewards import FULL_SCORE
from consumer.grpo.reporting.reporter import Reporter
from consumer.grpo.reporting.step_log import read_evaluations
from consumer.handle.evaluation_round import EvaluationRound
from consumer.handle.rollout_consumer import RolloutConsumer

log = logging.getLogger("rolloutmq.trainer")


def measure(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """Return the metrics of the groups, in total and by data source if there are several.

    `eval/accuracy`: share of rollouts with a full score. `eval/score`: mean score; a missing one
    counts as 0. `eval/pass@1`, `@2`, `@4` … up to the size of the smallest group, where it has
    several rollouts: the probability that at least one of k is right (unbiased, Chen et al. 2021,
    arXiv:2107.03374, equation 1). `eval/avg_pass@k`: the mean of these.
    """
    metrics = _measure(groups)
    metrics["rollouts"] = float(sum(len(group) for group in groups))
    metrics["groups"] = float(len(groups))
    by_source: dict[str, list[RolloutGroup]] = defaultdict(list)
    for group in groups:
        by_source[group.shared.data_source or "all"].append(group)
    if len(by_source) > 1:
        for source, part in by_source.items():
            metrics |= {f"{name}/{source}": value for name, value in _measure(part).items()}
    return {f"eval/{name}": value for name, value in metrics.items()}


def _measure(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    scores = [np.nan_to_num(group.scores[group.in_training], nan=0.0) for group in groups]
    column = np.concatenate(scores)
    metrics = {"accuracy": float((column >= FULL_SCORE).mean()), "score": float(column.mean())}
    return metrics | _pass_at(scores)


def _pass_at(scores: Sequence[NDArray[np.float32]]) -> dict[str, float]:
    smallest = min(len(group) for group in scores)
    if smallest < 2:
        return {}
    metrics = {}
    for exponent in range(smallest.bit_length()):
        k = 2**exponent
        probabilities = [_probability(group >= FULL_SCORE, k) for group in scores]
        metrics[f"pass@{k}"] = float(np.mean(probabilities))
    return metrics | {"avg_pass@k": sum(metrics.values()) / len(metrics)}


def _probability(right: NDArray[np.bool_], k: int) -> float:
    """Return the probability that one of k rollouts, drawn without replacement, is right."""
    wrong = int((~right).sum())
    return 1.0 - comb(wrong, k) / comb(len(right), k)


class EvaluationPlan:
    """Runs the evaluations of one trainer.

    `known`: the run's evaluation tasks. `start`: the checkpoint's step, whose logged evaluations
    are not repeated. `free_memory`: called while one waits for memory that only a checkpoint frees.
    """

    def __init__(
        self,
        config: TrainingConfig,
        known: Collection[str],
        consumer: RolloutConsumer,
        reporter: Reporter,
        start: int,
        free_memory: Callable[[], None],
    ) -> None:
        # a config that was edited since may have others
        self._held_out = [name for name in known if name in config.tasks]
        self._config = config
        self._consumer = consumer
        self._reporter = reporter
        self._start = start
        self._free_memory = free_memory
        self._pending: list[tuple[int, EvaluationRound]] = []
        self._started: set[tuple[str, int]] = set()

    @property
    def is_exclusive(self) -> bool:
        return self._config.evaluation.flow == "exclusive"

    def tasks(self, step: int, last: int) -> list[str]:
        every = self._config.evaluation.every_steps
        is_due = step in (0, last) or (every is not None and step % every == 0)
        if not is_due:
            return []
        logged = read_evaluations(self._config.run.folder) if step == self._start else ()
        done = self._started.union(logged)
        return [name for name in self._held_out if (name, step) not in done]

    def measure(self, step: int, last: int) -> None:
        """Evaluate the weights of `step` if due: now, or in the background."""
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
        for step, pending in list(self._pending):
            groups = pending.poll()
            if groups is not None:
                self._pending.remove((step, pending))
                self._record(step, pending.task, groups)

    def finish(self) -> None:
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
        columns = [group.columns.get("spans") for group in groups]
        newest = max((spans[:, 3].max() for spans in columns if spans is not None), default=step)
        metrics = measure(groups)
        metrics["eval/newest_version"] = float(newest)
        for group in groups:
            group.check_unchanged()
        self._consumer.report(step, metrics, task=task)
        self._reporter.add_evaluation(step, task, metrics)
        log.info("evaluation finished", extra={"task": task, "step": step, **metrics})


def log_wait_reason(reason: NotReady) -> None:
    log.debug("%s", reason)
