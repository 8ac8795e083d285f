"""Which weights the trainer evaluates, and how: the first, the last, and some at an interval.

[evaluation] flow    the trainer             training jobs of the workers
foreground           waits for the result    continue, behind those of the evaluation
exclusive            waits for the result    are paused after the weights are published
background           continues               continue, behind those of the evaluation
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from math import comb

import numpy as np

from buffer.manifest import NotReady
from buffer.wire.group import RolloutGroup
from consumer.config.trainer import TrainingConfig
from consumer.grpo.learner.group_rewards import FULL_SCORE
from consumer.handle.evaluation_round import Evaluated, EvaluationRound
from consumer.handle.rollout_consumer import RolloutConsumer
from consumer.handle.step_log import read_evaluations

log = logging.getLogger("rolloutmq.trainer")


def outcome(found: Evaluated, *, leaves_out_failed: bool = False) -> dict[str, float]:
    """Return the metrics of an evaluation, and what they are of.

    `eval/failed`: problems of which every try failed, wrong in all means but with
    `leaves_out_failed`. `eval/oldest_version`, `/newest_version`: of the weights that answered.
    `eval/temperature`: the highest that was sampled with.
    """
    metrics = measure(found, {} if leaves_out_failed else found.failed)
    metrics["eval/failed"] = float(len(found.failed))
    metrics["eval/skipped"] = float(len(found.skipped))
    columns = [group.columns.get("spans") for group in found]
    spans = [each[:, 3] for each in columns if each is not None and len(each)]
    if spans:
        versions = np.concatenate(spans)
        metrics["eval/oldest_version"] = float(versions.min())
        metrics["eval/newest_version"] = float(versions.max())
    if found:
        used = [state.sample_params.temperature for group in found for state in group.states]
        metrics["eval/temperature"] = max(used)
    return metrics


def measure(
    groups: Sequence[RolloutGroup], failed: Mapping[str, str] | None = None
) -> dict[str, float]:
    """Return the metrics of the groups, in total and by data source if there are several.

    `failed`: problems without a group, and their data sources: each counts as one that is wrong.
    `eval/accuracy`: share of rollouts with a full score. `eval/score`: mean score; a missing one
    counts as 0. `eval/pass@1`, `@2`, `@4` … up to the size of the smallest group, where it has
    several rollouts: the probability that at least one of k is right (unbiased, Chen et al. 2021,
    arXiv:2107.03374, equation 1). `eval/avg_pass@k`: the mean of these.
    """
    lost = failed or {}
    metrics = _measure(groups, len(lost))
    metrics["rollouts"] = float(sum(len(group) for group in groups))
    metrics["groups"] = float(len(groups))
    by_source: dict[str, list[RolloutGroup]] = defaultdict(list)
    for group in groups:
        by_source[group.shared.data_source or "all"].append(group)
    lost_of = Counter(source for source in lost.values() if source)
    if len(sources := {*by_source, *lost_of}) > 1:
        for source in sources:
            part = _measure(by_source.get(source, []), lost_of[source])
            metrics |= {f"{name}/{source}": value for name, value in part.items()}
    return {f"eval/{name}": value for name, value in metrics.items()}


def _measure(groups: Sequence[RolloutGroup], failed: int) -> dict[str, float]:
    if not groups:
        return {"accuracy": 0.0, "score": 0.0} if failed else {}
    scores = [np.nan_to_num(group.scores[group.in_training], nan=0.0) for group in groups]
    column = np.concatenate(scores)
    metrics = {"accuracy": float((column >= FULL_SCORE).mean()), "score": float(column.mean())}
    smallest = min(len(group) for group in scores)
    if smallest > 1:
        counts = [(len(group), int((group < FULL_SCORE).sum())) for group in scores]
        pass_at = {}
        for k in (2**exponent for exponent in range(smallest.bit_length())):
            # of k rollouts, drawn without replacement, one is right
            found = [1.0 - comb(wrong, k) / comb(size, k) for size, wrong in counts]
            pass_at[f"pass@{k}"] = float(np.mean(found))
        metrics |= pass_at | {"avg_pass@k": sum(pass_at.values()) / len(pass_at)}
    answered = len(groups) / (len(groups) + failed)
    return {name: value * answered for name, value in metrics.items()}


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
        start: int,
        free_memory: Callable[[], None],
    ) -> None:
        # a config that was edited since may have others
        self._held_out = [name for name in known if name in config.tasks]
        self._config = config
        self._consumer = consumer
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

    def _record(self, step: int, task: str, found: Evaluated) -> None:
        leaves_out = self._config.leaves_out_failed(task)
        metrics = outcome(found, leaves_out_failed=leaves_out)
        for group in found:
            group.check_unchanged()
        if found.failed:
            count = f"{len(found.failed)} of {len(found) + len(found.failed)} problems"
            how = "are left out" if leaves_out else "count as wrong"
            log.warning("task %s: %s failed in every try, and %s: %s", task, count, how,
                        ", ".join(sorted(found.failed)))  # fmt: skip
        if found.skipped:
            log.warning("task %s: %d problems were skipped, and are left out: %s", task,
                        len(found.skipped), ", ".join(sorted(found.skipped)))  # fmt: skip
        self._consumer.report(step, metrics, task=task)
        log.info("evaluation finished", extra={"task": task, "step": step, **metrics})


def log_wait_reason(reason: NotReady) -> None:
    log.debug("%s", reason)
