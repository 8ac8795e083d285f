"""Define a simulated fleet and trainer, and the figures that result, as in a run's config.

Invariant: a setting that validates can be simulated. The benchmark of the real pipeline fills in
the same `Outcome`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import ceil
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from buffer.wire.staleness import last_step_for, stale_threshold

# The effect of a weight update on running groups: [policy] pause_mode, or "partial" for abort with
# [strategy] enable_partial_rollout.
Interruption = Literal["keep", "drain", "abort", "partial"]


class Setting(BaseModel):
    """A fleet and a trainer. Times in seconds, lengths in tokens, ages in train steps."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    workers: int = Field(ge=1)
    sequences: int = Field(ge=1)  # in one engine at once; more wait in its queue
    concurrency: int = Field(ge=1)  # groups that a worker holds at once
    group_size: int = Field(ge=1)  # rollouts of a prompt
    batch_size: int = Field(ge=1)  # groups of a train step
    token_s: float = Field(gt=0)  # between two tokens of one sequence
    # until the first token of a request, again after every interruption
    first_token_s: float = Field(0.0, ge=0)
    step_s: float = Field(ge=0)  # of a train step
    sync_s: float = Field(0.0, ge=0)  # of loading new weights; no generation or training meanwhile
    sync_weights_interval: int = Field(1, ge=1)
    max_staleness: int = Field(0, ge=0)
    over_sample_threshold: float = Field(0.0, ge=0)
    interruption: Interruption = "keep"

    @property
    def stale_threshold(self) -> int:
        """Return the staleness from which a group is not trained any more."""
        return stale_threshold(self.max_staleness, self.sync_weights_interval)

    def target(self, version: int) -> int:
        """Return how many groups may have started, see `AsyncProduceStrategy.target`."""
        ahead = ceil(self.over_sample_threshold * self.batch_size)
        return self.batch_size * last_step_for(version, self.stale_threshold) + ahead

    def seconds(self, tokens: int) -> float:
        return self.first_token_s + self.token_s * (tokens - 1)

    def tokens(self, seconds: float) -> int:
        if seconds < self.first_token_s:
            return 0
        return int((seconds - self.first_token_s) / self.token_s) + 1


def candidates(
    fleet: Setting, staleness: Sequence[int], interruptions: Sequence[str]
) -> list[Setting]:
    """Return `fleet` with every staleness and interruption. Raises ValueError.

    On-policy settings without a surplus run nothing during an update, so they occur once.
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

    - busy_s, capacity_s: seconds in which sequences generated, or could have, over all sequences.
    - held: share of the groups that workers may hold at once that they did hold.
    - wasted_tokens: generated for groups that expired, or again after an interruption. Unfinished
      groups count neither as trained nor as wasted.
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
        """Return trained tokens per second."""
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
