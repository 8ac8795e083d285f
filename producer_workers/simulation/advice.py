"""Which of several simulated settings to choose, and why.

Invariant: staleness is a price, not a goal: the least of it that is still as fast, within `NEAR`,
as the fastest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from producer_workers.simulation.setting import Outcome, Setting

NEAR = 0.03
"""A throughput that is this close to the best is as good: draws and real fleets vary more."""

BUSY = 0.05
"""Whoever idles less than this is what the other one waits for."""

Simulated = tuple[Setting, Outcome]


@dataclass(frozen=True, slots=True)
class Advice:
    """`chosen` of the candidates; `reasons` in words; `workers_wanted`: as many as would keep the
    trainer busy.
    """

    chosen: int
    reasons: list[str]
    workers_wanted: float


def advise(candidates: Sequence[Simulated]) -> Advice:
    """The least staleness, then the least waste, of all that are near the fastest."""
    rates = [outcome.tokens_per_s for _, outcome in candidates]
    fastest = rates.index(max(rates))
    near = [place for place, rate in enumerate(rates) if rate >= (1 - NEAR) * rates[fastest]]
    chosen = min(
        near, key=lambda p: (candidates[p][0].max_staleness, candidates[p][1].waste, -rates[p])
    )
    wanted = _workers_wanted(*candidates[chosen])
    reasons = [
        _against_fastest(candidates, chosen, fastest),
        _bottleneck(*candidates[chosen], wanted),
    ]
    return Advice(chosen, [*reasons, *_against_fresher(candidates, chosen)], wanted)


def name_of(setting: Setting) -> str:
    """A setting as a line of a table says it."""
    return f"max_staleness {setting.max_staleness}, {setting.interruption}"


def as_config(setting: Setting) -> str:
    """The lines of a run's config that make it so."""
    partial = setting.interruption == "partial"
    return "\n".join(
        (
            "[policy]",
            f"max_staleness = {setting.max_staleness}",
            f"sync_weights_interval = {setting.sync_weights_interval}",
            f'pause_mode = "{"abort" if partial else setting.interruption}"',
            "[strategy]",
            f"enable_partial_rollout = {str(partial).lower()}",
            f"over_sample_threshold = {setting.over_sample_threshold:g}",
        )
    )


def _workers_wanted(setting: Setting, outcome: Outcome) -> float:
    """Busy all the time, workers that make what a trainer that never waits would use."""
    demand_s = outcome.busy_s / outcome.steps
    period_s = setting.step_s + setting.sync_s / setting.sync_weights_interval
    return demand_s / (setting.sequences * period_s) if period_s else float("inf")


def _against_fastest(candidates: Sequence[Simulated], chosen: int, fastest: int) -> str:
    if chosen == fastest:
        return f"{name_of(candidates[chosen][0])} is the fastest of these, and no fresher one is within {NEAR:.0%} of it."
    share = candidates[chosen][1].tokens_per_s / candidates[fastest][1].tokens_per_s
    return (
        f"{name_of(candidates[chosen][0])} reaches {share:.1%} of the fastest ({name_of(candidates[fastest][0])}), "
        f"at a mean staleness of {candidates[chosen][1].mean_staleness:.2f} "
        f"instead of {candidates[fastest][1].mean_staleness:.2f} train steps."
    )


def _bottleneck(setting: Setting, outcome: Outcome, wanted: float) -> str:
    if outcome.trainer_idle < BUSY:
        return (
            f"The trainer is what limits it: it idles {outcome.trainer_idle:.1%}. More workers bring nothing; "
            f"about {wanted:.1f} of the {setting.workers} are needed, if nothing fails."
        )
    idle = f"Workers idle {outcome.worker_idle:.1%}, the trainer {outcome.trainer_idle:.1%}"
    if outcome.worker_idle < BUSY:
        return f"{idle}: about {wanted:.1f} workers would keep the trainer busy; there are {setting.workers}."
    if outcome.held > 1 - BUSY:
        more = setting.concurrency / (1 - outcome.worker_idle)
        return (
            f"{idle}: workers hold all the groups they may, but rollouts that are done leave their place in the engine "
            f"empty. Let each hold more: concurrency {more:.0f} instead of {setting.concurrency}."
        )
    return f"{idle}: they wait for each other. More staleness, over-sampling or a larger batch would let more be in work."


def _against_fresher(candidates: Sequence[Simulated], chosen: int) -> list[str]:
    """What the staleness that it costs buys."""
    setting, outcome = candidates[chosen]
    fresher = [c for c in candidates if c[0].max_staleness < setting.max_staleness]
    if not fresher:
        return []
    best = max(fresher, key=lambda c: c[1].tokens_per_s)
    gain = outcome.tokens_per_s / best[1].tokens_per_s - 1
    return [f"It is {gain:.1%} faster than the best with less staleness ({name_of(best[0])})."]
