"""Define what is simulated (a fleet, a trainer, and their coupling), and the figures that result.

Invariant: a setting that validates can be simulated. Names and meanings are those of a run's
config. The benchmark of the real pipeline fills in the same `Outcome`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import ceil
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from buffer.wire.staleness import last_step_for, stale_threshold

Interruption = Literal["keep", "drain", "abort", "partial"]
"""What a weight update does to running groups.

It is [policy] pause_mode, and "partial" for abort with [strategy] enable_partial_rollout.
"""


class Setting(BaseModel):
    """A fleet and a trainer. Times in seconds, lengths in tokens, ages in train steps."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    workers: int = Field(ge=1)
    sequences: int = Field(ge=1)
    """in one engine at once; more wait in its queue"""
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
    """of loading new weights, in which nothing is generated or trained"""
    sync_weights_interval: int = Field(1, ge=1)
    max_staleness: int = Field(0, ge=0)
    over_sample_threshold: float = Field(0.0, ge=0)
    interruption: Interruption = "keep"

    @property
    def stale_threshold(self) -> int:
        """Return the staleness from which a group is not trained any more."""
        return stale_threshold(self.max_staleness, self.sync_weights_interval)

    def target(self, version: int) -> int:
        """Return how many groups may have been started, in all, while `version` is the newest.

        See `AsyncProduceStrategy.target`.
        """
        ahead = ceil(self.over_sample_threshold * self.batch_size)
        return self.batch_size * last_step_for(version, self.stale_threshold) + ahead

    def seconds(self, tokens: int) -> float:
        """Return the seconds that a sequence takes for that many tokens."""
        return self.first_token_s + self.token_s * (tokens - 1)

    def tokens(self, seconds: float) -> int:
        """Return the tokens that a sequence has made after that many seconds."""
        if seconds < self.first_token_s:
            return 0
        return int((seconds - self.first_token_s) / self.token_s) + 1


def candidates(
    fleet: Setting, staleness: Sequence[int], interruptions: Sequence[str]
) -> list[Setting]:
    """Return `fleet` with every staleness and interruption.

    Nothing runs when fully on-policy weights are updated, so that setting occurs once, unless more
    is started than the batch. Raises ValueError.
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
    """The figures of `steps` train steps, from the first draw to the end of the last step.

    - busy_s: seconds in which sequences generated, over all sequences; capacity_s: seconds there
      were.
    - held: share of the groups that workers may hold at once that they did hold.
    - trained_tokens: generated and trained; wasted_tokens: generated for groups that expired, or
      again after an interruption. What is unfinished at the end is neither.
    - staleness: groups by their age in train steps when they were taken.
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
        """Return trained tokens per second, the purpose of the run."""
        return self.trained_tokens / self.seconds

    @property
    def groups_per_s(self) -> float:
        return self.groups / self.seconds

    @property
    def worker_idle(self) -> float:
        """Return the share of the fleet's sequences that generated nothing."""
        return 1.0 - self.busy_s / self.capacity_s

    @property
    def trainer_idle(self) -> float:
        """Return the share of the time in which the trainer waited for a batch or for weights."""
        return 1.0 - self.trainer_busy_s / self.seconds

    @property
    def waste(self) -> float:
        """Return the share of the sampled tokens that were not trained."""
        made = self.trained_tokens + self.wasted_tokens
        return self.wasted_tokens / made if made else 0.0

    @property
    def mean_staleness(self) -> float:
        groups = sum(self.staleness.values())
        return sum(age * count for age, count in self.staleness.items()) / max(1, groups)

    def summary(self) -> dict[str, float]:
        """Return the figures that settings are compared by."""
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
