"""One question to the simulation: a fleet, a trainer, and how far the one may run ahead of the other.

Invariant: a setting that validates can be simulated; names and meanings are those of a run's config.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import ceil
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from buffer.staleness import last_step_for, stale_threshold

Interruption = Literal["keep", "drain", "abort", "partial"]
"""What a weight update does to running groups: [policy] pause_mode, and "partial" for abort with [strategy]
enable_partial_rollout."""


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
        """Groups that may have been started, in all, while `version` is the newest (`AsyncProduceStrategy.target`)."""
        ahead = ceil(self.over_sample_threshold * self.batch_size)
        return self.batch_size * last_step_for(version, self.stale_threshold) + ahead

    def seconds(self, tokens: int) -> float:
        """That a sequence takes for so many tokens."""
        return self.first_token_s + self.token_s * (tokens - 1)

    def tokens(self, seconds: float) -> int:
        """That a sequence has made after so many seconds."""
        return 0 if seconds < self.first_token_s else int((seconds - self.first_token_s) / self.token_s) + 1


def candidates(fleet: Setting, staleness: Sequence[int], interruptions: Sequence[str]) -> list[Setting]:
    """`fleet` with every staleness and interruption. Nothing runs when fully on-policy weights are updated, so that one
    is there once, unless more is started than the batch. Raises ValueError."""
    settings = []
    for age, interruption in product(sorted(set(staleness)), dict.fromkeys(interruptions)):
        differs = age > 0 or fleet.over_sample_threshold > 0 or interruption == interruptions[0]
        if differs:
            values = fleet.model_dump() | {"max_staleness": age, "interruption": interruption}
            settings.append(Setting.model_validate(values))
    return settings
