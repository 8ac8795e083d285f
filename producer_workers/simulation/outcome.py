"""What a simulated run came to; the benchmark of the real pipeline fills in the same form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of `steps` train steps, from the first draw to the end of the last step.

    `busy_s`: seconds of all sequences in which they generated, of `capacity_s` there were. `held`: share of the groups
    that workers may hold at once that they did hold. `trained_tokens`,
    `wasted_tokens`: generated and trained; generated for groups that expired, or again after an interruption. What is
    still under way at the end is neither. `staleness`: groups by their age in train steps when they were taken.
    """

    seconds: float
    steps: int
    groups: int
    trained_tokens: int
    wasted_tokens: int
    busy_s: float
    capacity_s: float
    held: float
    trainer_busy_s: float
    staleness: Mapping[int, int]

    @property
    def tokens_per_s(self) -> float:
        """Trained tokens per second: what the run is for."""
        return self.trained_tokens / self.seconds

    @property
    def groups_per_s(self) -> float:
        return self.groups / self.seconds

    @property
    def worker_idle(self) -> float:
        """Share of the fleet's sequences that generated nothing."""
        return 1.0 - self.busy_s / self.capacity_s

    @property
    def trainer_idle(self) -> float:
        """Share of the time in which the trainer did not train: waiting for a batch, or for new weights to arrive."""
        return 1.0 - self.trainer_busy_s / self.seconds

    @property
    def waste(self) -> float:
        """Share of the tokens that were paid for and not trained."""
        made = self.trained_tokens + self.wasted_tokens
        return self.wasted_tokens / made if made else 0.0

    @property
    def mean_staleness(self) -> float:
        return sum(age * count for age, count in self.staleness.items()) / max(1, sum(self.staleness.values()))

    def summary(self) -> dict[str, float]:
        """The figures that settings are compared by."""
        return {
            "step_s": self.seconds / self.steps,
            "tokens_per_s": self.tokens_per_s,
            "groups_per_s": self.groups_per_s,
            "worker_idle": self.worker_idle,
            "trainer_idle": self.trainer_idle,
            "staleness_mean": self.mean_staleness,
            "staleness_max": float(max(self.staleness, default=0)),
            "waste": self.waste,
        }
