"""Task weights from a user's function of what the model has learned (`[plan] curriculum`).

    def weights(progress):
        math = progress.tasks["math"]
        solved = math.raw_rewards_sum / max(1, math.raw_rewards_count)
        return {"math": 1.0, "olympiad": 0.0 if solved < 0.7 else 2.0}

The producer calls it after each train step with all counts (buffer/control/progress.py). Its
weights hold from the first step on for which no group has started. If it fails, the weights stay.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from pydantic import ValidationError

from buffer.control.live_settings import LiveSettings
from buffer.control.progress import ProduceProgress
from buffer.errors import ConfigError
from buffer.run import Run
from buffer.wire.own_copy import own_copy

log = logging.getLogger("rolloutmq.producer")

# Weights of some or all training tasks; None or {} leaves all as they are.
WeightFunction = Callable[[ProduceProgress], Mapping[str, float] | None]


class Curriculum:
    """Calls `function` once for every train step of a run."""

    def __init__(self, run: Run, function: WeightFunction) -> None:
        self._run = run
        self._function = function
        self._step = 0

    def follow(self, progress: ProduceProgress, producer: str) -> None:
        """Set the weights for a new train step. Raises Fenced if `producer` is not active."""
        step = progress.next_consumer_step - 1
        if step <= self._step:
            return
        self._step = step
        reason = ""
        try:
            if settings := self._settings(progress):
                self._run.set(settings, by="the curriculum", producer=producer)
        except ConfigError as error:
            reason = str(error)
            about = {"step": step}
            log.error("the task weights stay: %s", reason, extra=about, exc_info=error.__cause__)
        self._run.control.report_curriculum(producer, step, reason)

    def _settings(self, progress: ProduceProgress) -> LiveSettings | None:
        """Return the weights that the function wants, None if they are the present ones."""
        try:
            wanted = self._function(own_copy(progress)) or {}
            weights = {task: float(weight) for task, weight in wanted.items()}
            tasks = {task: {"weight": weight} for task, weight in weights.items()}
            settings = LiveSettings.model_validate({"tasks": tasks})
        except ValidationError as error:
            reasons = "; ".join(f"{part['loc'][1]}: {part['msg']}" for part in error.errors())
            raise ConfigError(f"the curriculum's weights are refused: {reasons}") from None
        except Exception as error:  # a user's function may raise anything, and must not end the run
            raise ConfigError(f"the curriculum failed: {type(error).__name__}: {error}") from error
        now = self._run.limits.newest_weights()
        is_change = any(now.get(task) != weight for task, weight in weights.items())
        return settings if is_change else None
