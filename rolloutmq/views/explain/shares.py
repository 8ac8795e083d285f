"""Shares of a task's newest groups that are missing from its training data, or distort it.

The newest 128 to 256 produced groups are counted (`lua/shared/ends.lua`), or all groups of
a young run.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from consumer.handle.step_log import TrainedStep
from rolloutmq.views.run_view import TaskView

METRICS = ("failed", "truncated", "expired", "unparsed", "filtered_groups")  # of a train step
STEPS = 20  # whose mean is reported
# a share of fewer groups or rollouts in all, or with fewer of its kind, may be chance
FEWEST, FEWEST_CASES = 20, 3


class _Rule(NamedTuple):
    warning: float
    error: float
    unit: str
    words: str
    fix: str


_RULES = {
    # rows that fail are never trained: the model learns from the other rows only
    "failed": _Rule(0.05, 0.2, "groups", "failed in every try",
        "`rolloutmq dead` has the causes; fix them, then `rolloutmq requeue --all-dead --yes` "
        "starts these groups again"),
    # a cut response gets a score for its length: the model learns to be short. Never an error: a
    # model that has not learned to end its answers may begin with all of them
    "truncated": _Rule(0.1, math.inf, "rollouts", "reached their token limit",
        "a larger `tasks.TASK.sample.max_tokens`"),
    # such groups start again or are dropped: time is lost, and long responses are trained less
    "expired": _Rule(0.2, 0.5, "groups", "became too old",
        "a larger `tasks.TASK.max_staleness`, or fewer groups ahead"),
    # some are normal while a model learns the form of an answer
    "unparsed": _Rule(0.5, 0.9, "rollouts", "have no answer that the judge could find",
        "ask for a form of answer in the prompt, or let the judge read more of them"),
    # groups with equal scores teach nothing: half is normal, 95 % makes a batch 20 times the work
    "filtered": _Rule(0.8, 0.95, "groups", "were filtered",
        "`rolloutmq logs events` shows them; prompts of another difficulty give more to learn"),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Share:
    """`number` of the newest `total` groups or rollouts of a task ended in the way of `name`."""

    task: str
    name: str
    number: int
    total: int

    @property
    def share(self) -> float:
        return self.number / self.total if self.total else 0.0

    @property
    def level(self) -> Literal["note", "warning", "error"]:
        is_chance = self.total < FEWEST or self.number < FEWEST_CASES
        if is_chance or self.share < _RULES[self.name].warning:
            return "note"
        return "warning" if self.share < _RULES[self.name].error else "error"

    def __str__(self) -> str:
        rule = _RULES[self.name]
        return f"{self.share:.0%} of the last {self.total} {rule.unit} {rule.words}"

    @property
    def fix(self) -> str:
        return _RULES[self.name].fix.replace("TASK", self.task)


def mean_shares(steps: Sequence[TrainedStep]) -> str:
    """Return "failed math 7%, …" of the last train steps, from the trainer's log."""
    values: defaultdict[str, list[float]] = defaultdict(list)
    for step in steps[-STEPS:]:
        for metric, value in step.metrics.items():
            name, _, task = metric.partition("/")
            if task and name in METRICS:
                values[f"{name.removesuffix('_groups')} {task}"].append(value)
    means = {name: sum(own) / len(own) for name, own in sorted(values.items())}
    return ", ".join(f"{name} {mean:.0%}" for name, mean in means.items() if mean)


def shares_of(task: TaskView) -> Iterator[Share]:
    """Yield the shares of a task that are not 0."""
    produced, dead = task.recent("produced_groups"), task.recent("dead")
    expired, judged = task.recent("expirations"), task.recent("raw_rewards_count")
    counts = {
        "failed": (dead, produced + dead),
        "truncated": (task.recent("truncated"), judged),
        "expired": (expired, task.recent("consumed") + expired),
        "unparsed": (task.recent("unparsed"), judged),
        "filtered": (task.recent("filtered"), produced),
    }
    for name, (number, total) in counts.items():
        if number:
            yield Share(task.account.task, name, number, total)
