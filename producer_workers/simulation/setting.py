"""Define a simulated fleet and trainer, and the figures that result, as in a run's config.

Invariant: a setting that validates can be simulated. The benchmark of the real pipeline fills in
the same `Outcome`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from math import ceil
from pathlib import Path
from statistics import mean
from typing import Literal

import numpy as np
import orjson
from pydantic import BaseModel, ConfigDict, Field

from buffer.errors import DatasetError
from buffer.limits import Straggler
from buffer.wire.staleness import last_step_for, stale_threshold
from producer_workers.config.distribution import Distribution

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
    max_ahead: int = Field(1, ge=0)
    max_staleness: int = Field(0, ge=0)
    on_straggler: Straggler = "wait"
    over_sample_threshold: float = Field(0.0, ge=0)
    interruption: Interruption = "keep"

    @property
    def stale_threshold(self) -> int:
        """Return the staleness from which a group is not trained any more."""
        return stale_threshold(self.max_staleness, self.sync_weights_interval)

    def target(self, version: int) -> int:
        """Return how many groups may have started, see `AsyncProduceStrategy.target`."""
        ahead = min(self.max_ahead, self.max_staleness)
        horizon = stale_threshold(ahead, self.sync_weights_interval)
        surplus = ceil(self.over_sample_threshold * self.batch_size)
        return self.batch_size * last_step_for(version, horizon) + surplus

    def seconds(self, tokens: int) -> float:
        return self.first_token_s + self.token_s * (tokens - 1)

    def tokens(self, seconds: float) -> int:
        if seconds < self.first_token_s:
            return 0
        return int((seconds - self.first_token_s) / self.token_s) + 1


def candidates(
    fleet: Setting,
    staleness: Sequence[int],
    interruptions: Sequence[str],
    ahead: Sequence[int] = (1,),
    stragglers: Sequence[str] = ("wait",),
) -> list[Setting]:
    """Return `fleet` with every combination that differs from the others. Raises ValueError.

    On-policy settings without a surplus run nothing during an update: they occur once.
    """
    settings: dict[Setting, None] = {}
    for start, age, interruption, straggler in product(
        sorted(set(ahead)), sorted(set(staleness)), interruptions, stragglers
    ):
        values = {
            "max_ahead": min(start, age),
            "max_staleness": age,
            "interruption": interruption,
            "on_straggler": straggler,
        }
        if age == 0 and fleet.over_sample_threshold == 0:
            values |= {"interruption": interruptions[0], "on_straggler": stragglers[0]}
        settings[Setting.model_validate(fleet.model_dump() | values)] = None
    return list(settings)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The figures of `steps` train steps, from the first draw to the end of the last step.

    - busy_s, capacity_s: seconds in which sequences generated, or could have, over all sequences.
    - held: share of the groups that workers may hold at once that they did hold.
    - wasted_tokens: generated for groups that expired, or again after an interruption. Unfinished
      groups count neither as trained nor as wasted.
    - staleness: groups by their age in train steps when they were taken.
    - trained_lengths, expired_lengths: tokens of each response that was trained, or expired.
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
    trained_lengths: Sequence[int] = field(default=(), repr=False)
    expired_lengths: Sequence[int] = field(default=(), repr=False)

    @property
    def tokens_per_s(self) -> float:
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

    @property
    def length_ratio(self) -> float:
        """Return the mean length that was trained over the mean that was started; 1 is unbiased."""
        started = [*self.trained_lengths, *self.expired_lengths]
        return mean(self.trained_lengths) / mean(started) if self.trained_lengths else 1.0

    @property
    def tail_ratio(self) -> float:
        """Return the share of trained responses from the started p95 up, over that of started."""
        if not self.trained_lengths:
            return 1.0
        trained = np.array(self.trained_lengths)
        started = np.concatenate([trained, self.expired_lengths])
        bound = np.quantile(started, 0.95)
        share = (started >= bound).mean()
        return float((trained >= bound).mean() / share)

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
            "length_ratio": self.length_ratio,
            "tail_ratio": self.tail_ratio,
        }


Lengths = Callable[[int], list[int]]  # returns the tokens of each rollout of draw n, at least 1


def drawn_lengths(
    distribution: Distribution, group_size: int, *, longest: int, seed: int = 0
) -> Lengths:
    @cache  # settings are compared on the same draws
    def lengths(draw: int) -> list[int]:
        rng = np.random.default_rng([seed, draw])
        return [min(max(1, round(distribution.draw(rng))), longest) for _ in range(group_size)]

    return lengths


def picked_lengths(tokens: list[int], group_size: int, *, seed: int = 0) -> Lengths:
    """Pick lengths from a list, each rollout by itself."""

    @cache
    def lengths(draw: int) -> list[int]:
        picks = np.random.default_rng([seed, draw]).integers(0, len(tokens), group_size)
        return [tokens[pick] for pick in picks]

    return lengths


def read_trace(path: Path, token_s: float) -> list[int]:
    """Read the tokens of each line of a JSONL file: 812, {"tokens": 812}, or {"seconds": 9.5}.

    Seconds become tokens at `token_s`. Raises DatasetError naming the line.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise DatasetError(f"{path} cannot be read: {error}") from error
    tokens = [
        _tokens(path, number, line, token_s) for number, line in enumerate(lines, 1) if line.strip()
    ]
    if not tokens:
        raise DatasetError(
            f"{path} holds no lengths", hint='expected one {"tokens": 812} in each line'
        )
    return tokens


def _tokens(path: Path, number: int, line: bytes, token_s: float) -> int:
    hint = 'expected a number of tokens, {"tokens": 812} or {"seconds": 9.5}, above 0'
    try:
        value = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise DatasetError(f"{path}, line {number}: {error}", hint=hint) from error
    if isinstance(value, dict):
        value = value["tokens"] if "tokens" in value else value.get("seconds", 0) / token_s
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise DatasetError(f"{path}, line {number}: no length in {line[:80]!r}", hint=hint)
    return max(1, round(value))
