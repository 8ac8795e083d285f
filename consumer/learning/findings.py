"""Find out from the trained steps whether a run learns: `findings`, the one source of all views.

`status`, `doctor`, the browser and the report call it (`rolloutmq/views/explain/learning.py`), and
the trainer's log after each step (`LearningLog`).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from consumer.config.trainer import LEARNING
from consumer.handle.step_log import Evaluations, TrainedStep, read_evaluations, read_steps
from consumer.learning import checks
from consumer.learning.rules import RULES
from consumer.learning.window import STEPS, LearningFinding, Window

log = logging.getLogger("rolloutmq.trainer")

CHECKS: tuple[Callable[[Window], Iterator[LearningFinding]], ...] = (
    checks.reward_falls,
    checks.equal_rewards,
    checks.no_advantage,
    checks.entropy,
    checks.mismatch,
    *(rule.found for rule in RULES),
    checks.policy_jump,
    checks.one_part,
    checks.response_limit,
    checks.length_without_reward,
    checks.held_out_falls,
    checks.length_bias,
)

DEGENERATE = ("same_response", "looping", "entropy_explosion")
EFFECTS: Mapping[str, tuple[str, ...]] = {
    "reward_falls": (*DEGENERATE, "length_without_reward"),
    "equal_rewards": (*DEGENERATE, "reward_falls"),
    "no_advantage": (*DEGENERATE, "reward_falls", "equal_rewards"),
    "entropy_collapse": DEGENERATE,
    "response_limit": (*DEGENERATE, "length_without_reward"),
    "length_without_reward": DEGENERATE,
    "policy_jump": ("mismatch",),
    "no_gradient": (*DEGENERATE, "equal_rewards", "no_advantage", "mismatch"),
}
"""A finding is left out where one of these causes is found, of the same task if both are of one."""

ENDED = 10  # steps without a finding after which it has ended: near a threshold it comes and goes


def findings(steps: Sequence[TrainedStep], evaluations: Evaluations) -> list[LearningFinding]:
    """Return what the newest steps show, without what `[trainer] silence` names at the last one.

    It raises nothing, also for metrics that are missing or NaN.
    """
    if not steps:
        return []
    window = Window(steps[-STEPS:], evaluations)
    found: dict[tuple[str, str], LearningFinding] = {}  # the first of each kind and task
    with np.errstate(all="ignore"):
        for check in CHECKS:
            for each in check(window):
                found.setdefault((each.name, each.task), each)
    return [
        replace(each, name=LEARNING + name)
        for (name, task), each in found.items()
        if LEARNING + name not in steps[-1].silenced and not _is_effect(name, task, found)
    ]


def _is_effect(name: str, task: str, found: Iterable[tuple[str, str]]) -> bool:
    """Return whether a finding has a cause among those that are found, by name and task."""
    causes = EFFECTS.get(name, ())
    return any(
        cause in causes and (task == of_task or "" in (task, of_task)) for cause, of_task in found
    )


class LearningLog:
    """Logs a finding when it begins, and when it has ended; those of an earlier trainer are known.

    One thread calls it.
    """

    def __init__(self, folder: Path, silenced: tuple[str, ...] = ()) -> None:
        self._silenced = silenced
        self._steps = deque(read_steps(folder)[-STEPS:], STEPS)
        self._evaluations = read_evaluations(folder)
        last = self._steps[-1].step if self._steps else 0
        # by name and task: at which step it was found last
        known = ((each.name.removeprefix(LEARNING), each.task) for each in self._found())
        self._lasting = dict.fromkeys(known, last)

    def add_evaluation(self, step: int, task: str, metrics: dict[str, float]) -> None:
        self._evaluations[task, step] = metrics

    def add_step(self, step: int, gids: Sequence[str], metrics: dict[str, float]) -> None:
        """Add a step, which replaces those from its number on."""
        while self._steps and self._steps[-1].step >= step:
            self._steps.pop()
        self._steps.append(TrainedStep(step, "", tuple(gids), metrics, silenced=self._silenced))
        levels = {"note": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
        for each in self._found():
            kind = (each.name.removeprefix(LEARNING), each.task)
            # what a cause that ends leaves behind is not new
            if kind not in self._lasting and not _is_effect(*kind, self._lasting):
                what = f"{each.what}, since step {each.since}. Try: {each.fix}"
                look = ", ".join(each.look)
                log.log(levels[each.level], what, extra={"finding": each.name, "look": look})
            self._lasting[kind] = step
        for (name, task), last in [*self._lasting.items()]:
            if step - last >= ENDED:
                of_task = f" of task {task}" if task else ""
                what = f"{LEARNING}{name}{of_task} has ended"
                log.info(what, extra={"finding": LEARNING + name})
                del self._lasting[name, task]

    def _found(self) -> list[LearningFinding]:
        return findings([*self._steps], self._evaluations)
