"""One question to the simulation: a fleet, a trainer, and how far the one may run ahead of the
other.

Invariant: a setting that validates can be simulated; names and meanings are those of a run's
config.

What a simulated run came to; the benchmark of the real pipeline fills in the same form.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import ceil
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from buffer.model.staleness import last_step_for, stale_threshold

Interruption = Literal["keep", "drain", "abort", "partial"]
"""What a weight update does to running groups: [policy] pause_mode, and "partial" for abort with
[strategy] enable_partial_rollout.
"""


class Setting(BaseModel):
    """Times in seconds, lengths in tokens, ages in train steps."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    workers: int = Field(ge=1)
    sequences: int = Field(ge=1)
    """in one engine at once; more wait in line there"""
    concurrency: int = Field(ge=1)
    """groups that a worker holds at once"""
    group_size: int = Field(ge=1)
    """rollouts of a prompt"""
    batch_size: int = Field(ge=1)
    """groups of a train step"""
    token_s: float = Field(gt=0)
    """between two tokens of one sequence"""
    first_token_s: float = Field(0.0, ge=0)
    """until the first token of a request, again after every interruption"""
    step_s: float = Field(ge=0)
    """of a train step"""
    sync_s: float = Field(0.0, ge=0)
    """in which nothing is generated or trained while new weights are loaded"""
    sync_weights_interval: int = Field(1, ge=1)
    max_staleness: int = Field(0, ge=0)
    over_sample_threshold: float = Field(0.0, ge=0)
    interruption: Interruption = "keep"

    @property
    def stale_threshold(self) -> int:
        """Staleness from which a group is not trained any more."""
        return stale_threshold(self.max_staleness, self.sync_weights_interval)

    def target(self, version: int) -> int:
        """Groups that may have been started, in all, while `version` is the newest
        (`AsyncProduceStrategy.target`).
        """
        ahead = ceil(self.over_sample_threshold * self.batch_size)
        return self.batch_size * last_step_for(version, self.stale_threshold) + ahead

    def seconds(self, tokens: int) -> float:
        """That a sequence takes for so many tokens."""
        return self.first_token_s + self.token_s * (tokens - 1)

    def tokens(self, seconds: float) -> int:
        """That a sequence has made after so many seconds."""
        return (
            0
            if seconds < self.first_token_s
            else int((seconds - self.first_token_s) / self.token_s) + 1
        )


def candidates(
    fleet: Setting, staleness: Sequence[int], interruptions: Sequence[str]
) -> list[Setting]:
    """`fleet` with every staleness and interruption. Nothing runs when fully on-policy weights are
    updated, so that one is there once, unless more is started than the batch. Raises ValueError.
    """
    settings = []
    for age, interruption in product(sorted(set(staleness)), dict.fromkeys(interruptions)):
        differs = age > 0 or fleet.over_sample_threshold > 0 or interruption == interruptions[0]
        if differs:
            values = fleet.model_dump() | {"max_staleness": age, "interruption": interruption}
            settings.append(Setting.model_validate(values))
    return settings


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of `steps` train steps, from the first draw to the end of the last step.

    `busy_s`: seconds of all sequences in which they generated, of `capacity_s` there were. `held`:
    share of the groups that workers may hold at once that they did hold. `trained_tokens`,
    `wasted_tokens`: generated and trained; generated for groups that expired, or again after an
    interruption. What is still under way at the end is neither. `staleness`: groups by their age in
    train steps when they were taken.
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
        """Share of the time in which the trainer did not train: waiting for a batch, or for new
        weights to arrive.
        """
        return 1.0 - self.trainer_busy_s / self.seconds

    @property
    def waste(self) -> float:
        """Share of the tokens that were paid for and not trained."""
        made = self.trained_tokens + self.wasted_tokens
        return self.wasted_tokens / made if made else 0.0

    @property
    def mean_staleness(self) -> float:
        return sum(age * count for age, count in self.staleness.items()) / max(
            1, sum(self.staleness.values())
        )

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
