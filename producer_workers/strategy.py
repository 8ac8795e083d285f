"""How far production runs ahead of the trainer (XTuner's `AsyncProduceStrategy`, as numbers instead of a loop).

A target is absolute and cumulative, and a pure function of the newest weights M: groups are started for every step
that weights M may still serve, T <= M + stale_threshold. What was used, is ready or is in work counts against it,
in the script that starts groups, so a crash, a second producer or a lost reply cannot overshoot.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from buffer.config_file import ConfigFile, allocate
from buffer.limits import RunLimits
from buffer.staleness import last_step_for


@dataclass(frozen=True, slots=True)
class AsyncProduceStrategy:
    """`shares`: groups of each training task in one batch; `steps`: train steps in all."""

    shares: dict[str, int]
    steps: int
    over_sample_threshold: float
    stale_threshold: int
    tail_batch_trigger_size: int

    @classmethod
    def of(cls, config: ConfigFile) -> AsyncProduceStrategy:
        weights = {name: task.weight for name, task in config.tasks.items() if task.eval_of is None}
        return cls(
            shares=allocate(config.plan.batch_size, weights),
            steps=config.plan.steps,
            over_sample_threshold=config.strategy.over_sample_threshold,
            stale_threshold=config.policy.stale_threshold,
            tail_batch_trigger_size=config.strategy.tail_batch_trigger_size,
        )

    def target(self, task: str, version: int) -> int:
        """Groups of `task` that may have been started, in all, while `version` is the newest policy version."""
        share = self.shares[task]
        last = min(last_step_for(version, self.stale_threshold), self.steps)
        ahead = ceil(self.over_sample_threshold * share) if last < self.steps else 0
        return share * last + ahead

    def reissue_from(self, limits: RunLimits) -> list[tuple[str, int]]:
        """(pool, least size) to start again before new prompts are drawn: expired ones once enough wait."""
        trigger = limits.tail_batch_trigger_size
        expired = [("expired", max(1, trigger))] if trigger >= 0 else []
        return [*expired, ("aborted", 1)]
