"""Compare what happens to long responses: dropped, retried, waited for, or trained late.

Plays no pipeline: the event model of `rolloutmq simulate`, on the same draws for every way. A group
is a prompt whose responses are about equally long, so a retry of a long group is long again.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import numpy as np

from benchmarks.figure import Figure
from producer_workers.simulation.event_model import REDRAWN, simulate
from producer_workers.simulation.setting import Lengths, Outcome, Setting

FLEET = Setting(
    workers=8,
    sequences=64,
    concurrency=16,
    group_size=8,
    batch_size=64,
    token_s=1 / 40,
    first_token_s=0.5,
    step_s=150.0,
    sync_s=2.0,
)
MEDIAN, LONGEST = 2000.0, 32_768  # tokens
SPREADS = (1.0, 1.3)
"""Sigma of lognormal lengths: long and very long tails."""

WAYS: dict[str, dict[str, object]] = {
    "drop": {"on_straggler": "drop"},
    "retry": {"on_straggler": "retry"},
    "wait": {"on_straggler": "wait"},
    "two limits": {"max_ahead": 1, "on_straggler": "drop"},
}
"""The first three start as far ahead as they train; the last starts one publication ahead."""


def stragglers(steps: int, ages: tuple[int, ...]) -> Iterator[Figure]:
    """Return step time, waste and length bias of every way, staleness and spread."""
    for spread in SPREADS:
        for age in ages:
            for way, changes in WAYS.items():
                values = FLEET.model_dump() | {"max_ahead": age, "max_staleness": age} | changes
                outcome = simulate(Setting.model_validate(values), _lengths(spread), steps)
                yield from _figures(f"stragglers, sigma {spread:g}", f"{way}, {age}", outcome)


def _figures(section: str, name: str, outcome: Outcome) -> Iterator[Figure]:
    yield Figure(section, f"{name}: seconds a step", outcome.seconds / outcome.steps, "s")
    yield Figure(section, f"{name}: mean length", outcome.length_ratio, "x")
    details = {
        "p95 and above": outcome.tail_ratio,
        "waste": outcome.waste,
        "staleness": outcome.mean_staleness,
        "oldest": float(max(outcome.staleness, default=0)),
    }
    for what, value in details.items():
        yield Figure(section, f"{name}: {what}", value, "x", detail=True)


def _lengths(spread: float) -> Lengths:
    """Return lengths that the prompt sets; its responses differ by a tenth."""

    @cache
    def lengths(draw: int) -> list[int]:
        of_prompt = np.random.default_rng([round(10 * spread), draw % REDRAWN])
        prompt = MEDIAN * np.exp(spread * of_prompt.standard_normal())
        rng = np.random.default_rng(draw)
        own = prompt * np.exp(0.1 * rng.standard_normal(FLEET.group_size))
        return [int(tokens) for tokens in np.clip(own, 1, LONGEST)]

    return lengths
