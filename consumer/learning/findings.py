"""Find out from the trained steps whether a run learns: `findings`, the one source of all views.

`status`, `doctor`, the browser and the report call it (`rolloutmq/views/explain/learning.py`), and
the trainer's log after each step (`LearningLog`).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from consumer.config.trainer import LEARNING
from consumer.handle.step_log import Evaluations, TrainedStep, read_evaluations, read_steps
from consumer.learning import policy_checks, reward_checks
from consumer.learning.window import STEPS, Finding, Window

log = logging.getLogger("rolloutmq.trainer")

Check = Callable[[Window], Iterator[Finding]]

CHECKS: Mapping[str, Check] = {
    f"{LEARNING}{check.__name__}": check
    for check in (
        reward_checks.equal_rewards,
        reward_checks.no_advantage,
        policy_checks.no_gradient,
        policy_checks.gradient_not_finite,
        policy_checks.gradient_clipped,
        policy_checks.entropy_collapse,
        policy_checks.entropy_explosion,
        policy_checks.policy_jump,
        policy_checks.mismatch,
        reward_checks.same_response,
        reward_checks.looping,
        reward_checks.judge_disagreement,
        reward_checks.one_part,
        reward_checks.response_limit,
        reward_checks.length_without_reward,
        reward_checks.held_out_falls,
        policy_checks.length_bias,
    )
}
"""By the name in `[trainer] silence`."""

EFFECTS: Mapping[str, tuple[str, ...]] = {
    "equal_rewards": ("same_response",),
    "no_advantage": ("same_response",),
    "entropy_collapse": ("same_response",),
    "response_limit": ("same_response", "looping"),
    "no_gradient": ("same_response", "equal_rewards", "no_advantage"),
}
"""A finding is left out where one of these causes is found, of the same task if it is of one."""

ENDED = 10  # steps without a finding after which it has ended: near a threshold it comes and goes


def findings(steps: Sequence[TrainedStep], evaluations: Evaluations) -> list[Finding]:
    """Return what the newest steps show, without what `[trainer] silence` names at the last one.

    Raises nothing, whatever the metrics are.
    """
    if not steps:
        return []
    window = Window.of(steps, evaluations)
    found: list[Finding] = []
    with np.errstate(all="ignore"):
        for name, check in CHECKS.items():
            if name not in steps[-1].silenced:
                found += [replace(each, name=name) for each in check(window)]
    tasks = {(each.name, task) for each in found for task in (each.task, "")}
    return [
        each
        for each in found
        if not any(
            (LEARNING + cause, each.task) in tasks
            for cause in EFFECTS.get(each.name.removeprefix(LEARNING), ())
        )
    ]


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
        self._lasting = {(each.name, each.task): last for each in self._found()}

    def add_evaluation(self, step: int, task: str, metrics: dict[str, float]) -> None:
        self._evaluations[task, step] = metrics

    def add_step(self, step: int, gids: Sequence[str], metrics: dict[str, float]) -> None:
        """Add a step, which replaces those from its number on."""
        while self._steps and self._steps[-1].step >= step:
            self._steps.pop()
        self._steps.append(TrainedStep(step, "", tuple(gids), metrics, silenced=self._silenced))
        levels = {"note": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
        for each in self._found():
            if (each.name, each.task) not in self._lasting:
                what = f"{each.what}, since step {each.since}. Try: {each.fix}"
                look = ", ".join(each.look)
                log.log(levels[each.level], what, extra={"finding": each.name, "look": look})
            self._lasting[each.name, each.task] = step
        for (name, task), last in [*self._lasting.items()]:
            if step - last >= ENDED:
                of_task = f" of task {task}" if task else ""
                log.info("%s%s has ended", name, of_task, extra={"finding": name})
                del self._lasting[name, task]

    def _found(self) -> list[Finding]:
        return findings([*self._steps], self._evaluations)
