"""Task weights that follow what the model can do, by a function of the user's (`[plan]
curriculum`).

    def weights(progress):
        math = progress.tasks["math"]
        solved = math.raw_rewards_sum / max(1, math.raw_rewards_count)
        return {"math": 1.0, "olympiad": 0.0 if solved < 0.7 else 2.0}

Called by the active producer after each train step, with everything that was counted so far
(buffer/control/progress.py). What it returns is checked, versioned and told like `rolloutmq set`,
and holds from the first step on for which nothing was started. A function that fails changes
nothing: the weights stay, and log, events, `status` and `doctor` say why.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from pydantic import ValidationError

from buffer.control.live_settings import LiveSettings
from buffer.control.progress import ProduceProgress
from buffer.errors import ConfigError
from buffer.model.dotted_path import load_object
from buffer.run import Run

log = logging.getLogger("rolloutmq.producer")

WeightFunction = Callable[[ProduceProgress], Mapping[str, float] | None]
"""Weights of training tasks, of some or all; None or an empty mapping leaves all as they are."""


def load_weight_function(spec: str | None) -> WeightFunction | None:
    """The function at "module:function". Raises ConfigError."""
    if spec is None:
        return None
    function = load_object(spec, kind="curriculum")
    if not callable(function):
        raise ConfigError(f"curriculum {spec!r} is not a function", hint='give "module:function"')
    chosen: WeightFunction = function
    return chosen


class Curriculum:
    """Asks `function` once for every train step of a run."""

    def __init__(self, run: Run, function: WeightFunction) -> None:
        self._run = run
        self._function = function
        self._step = 0

    def follow(self, progress: ProduceProgress, producer: str) -> None:
        """Ask, if a train step was taken since the last time, and set the weights if they are
        others. Raises Fenced where `producer`, who asks, is not the producer any more.
        """
        step = progress.next_consumer_step - 1
        if step <= self._step:
            return
        self._step = step
        reason = ""
        try:
            if settings := self._ask(progress):
                self._run.set(settings, producer=producer)
        except ConfigError as error:
            reason = str(error)
            log.error(
                "the task weights stay: %s", reason, extra={"step": step}, exc_info=error.__cause__
            )
        self._run.control.report_curriculum(producer, step, reason)

    def _ask(self, progress: ProduceProgress) -> LiveSettings | None:
        try:
            weights = {
                task: float(weight) for task, weight in (self._function(progress) or {}).items()
            }
            settings = LiveSettings.model_validate(
                {"tasks": {task: {"weight": w} for task, w in weights.items()}}
            )
        except ValidationError as error:
            reasons = "; ".join(f"{part['loc'][1]}: {part['msg']}" for part in error.errors())
            raise ConfigError(f"the curriculum's weights are refused: {reasons}") from None
        except Exception as error:  # the user's function: whatever it raises, production goes on with the old weights
            raise ConfigError(f"the curriculum failed: {type(error).__name__}: {error}") from error
        now = self._run.limits.newest_weights()
        return (
            settings if any(now.get(task) != weight for task, weight in weights.items()) else None
        )
