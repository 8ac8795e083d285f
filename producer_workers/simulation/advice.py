"""Choose the simulated setting with the least staleness that is nearly the fastest (`NEAR`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from producer_workers.simulation.setting import Outcome, Setting

NEAR = 0.03  # a throughput this close to the best is as good: draws and real fleets vary more

BIAS = 0.05  # the mean length of what is trained may be this much below what was started

BUSY = 0.05  # the side that idles less than this limits the run

Simulated = tuple[Setting, Outcome]


@dataclass(frozen=True, slots=True)
class Advice:
    """The advice: `chosen` is an index of the candidates, `reasons` are sentences.

    `workers_wanted`: how many workers would keep the trainer busy.
    """

    chosen: int
    reasons: list[str]
    workers_wanted: float


def advise(candidates: Sequence[Simulated]) -> Advice:
    """Choose the least staleness, then the least waste, of the unbiased that are nearly fastest."""
    fair = [n for n, (_, outcome) in enumerate(candidates) if outcome.length_ratio >= 1 - BIAS]
    rates = [outcome.tokens_per_s for _, outcome in candidates]
    fastest = max(fair or range(len(rates)), key=rates.__getitem__)
    near = [n for n in fair or range(len(rates)) if rates[n] >= (1 - NEAR) * rates[fastest]]

    def price(n: int) -> tuple[float, float, float]:
        return round(candidates[n][1].mean_staleness, 1), candidates[n][1].waste, -rates[n]

    chosen = min(near, key=price)
    setting, outcome = candidates[chosen]
    # always busy workers that supply a trainer that never waits
    period_s = setting.step_s + setting.sync_s / setting.sync_weights_interval
    demand_s = outcome.busy_s / outcome.steps / setting.sequences
    wanted = demand_s / period_s if period_s else float("inf")
    reasons = [_against_fastest(candidates, chosen, fastest), _bottleneck(setting, outcome, wanted)]
    faster = [n for n, rate in enumerate(rates) if rate > rates[chosen]]
    if biased := [n for n in faster if candidates[n][1].length_ratio < 1 - BIAS]:
        best = max(biased, key=rates.__getitem__)
        other, found = candidates[best]
        reasons.append(
            f"{name_of(other)} is {rates[best] / rates[chosen] - 1:.1%} faster, but the mean "
            f"length of what it trains is {found.length_ratio:.2f} of what was started: the model "
            "would learn to be short."
        )
    if fresher := [c for c in candidates if c[1].mean_staleness < outcome.mean_staleness]:
        other, found = max(fresher, key=lambda c: c[1].tokens_per_s)
        gain = outcome.tokens_per_s / found.tokens_per_s - 1
        reasons.append(
            f"It is {gain:.1%} faster than the best with less staleness ({name_of(other)})."
        )
    return Advice(chosen, reasons, wanted)


def name_of(setting: Setting) -> str:
    limits = f"max_ahead {setting.max_ahead}, max_staleness {setting.max_staleness}"
    straggler = "" if setting.on_straggler == "wait" else f", {setting.on_straggler}"
    return f"{limits}, {setting.interruption}{straggler}"


def as_config(setting: Setting) -> str:
    partial = setting.interruption == "partial"
    return "\n".join(
        (
            "[policy]",
            f"max_ahead = {setting.max_ahead}",
            f"max_staleness = {setting.max_staleness}",
            f"sync_weights_interval = {setting.sync_weights_interval}",
            f'pause_mode = "{"abort" if partial else setting.interruption}"',
            "[strategy]",
            f"enable_partial_rollout = {str(partial).lower()}",
            f"over_sample_threshold = {setting.over_sample_threshold:g}",
            f'on_straggler = "{setting.on_straggler}"',
        )
    )


def _against_fastest(candidates: Sequence[Simulated], chosen: int, fastest: int) -> str:
    setting, outcome = candidates[chosen]
    name = name_of(setting)
    if chosen == fastest:
        return (
            f"{name} is the fastest of these, "
            f"and none with less staleness is within {NEAR:.0%} of it."
        )
    other, best = candidates[fastest]
    share = outcome.tokens_per_s / best.tokens_per_s
    return (
        f"{name} reaches {share:.1%} of the fastest ({name_of(other)}), "
        f"at a mean staleness of {outcome.mean_staleness:.2f} "
        f"instead of {best.mean_staleness:.2f} train steps."
    )


def _bottleneck(setting: Setting, outcome: Outcome, wanted: float) -> str:
    if outcome.trainer_idle < BUSY:
        return (
            f"The trainer limits the run: it idles {outcome.trainer_idle:.1%}. "
            "More workers would not help; "
            f"about {wanted:.1f} of the {setting.workers} are needed, if nothing fails."
        )
    idle = f"Workers idle {outcome.worker_idle:.1%}, the trainer {outcome.trainer_idle:.1%}"
    if outcome.worker_idle < BUSY:
        return (
            f"{idle}: about {wanted:.1f} workers would keep the trainer busy; "
            f"there are {setting.workers}."
        )
    if outcome.held > 1 - BUSY:
        more = setting.concurrency / (1 - outcome.worker_idle)
        return (
            f"{idle}: workers hold all the groups they may, but finished rollouts leave their slot "
            f"in the engine empty. Set concurrency to {more:.0f} instead of {setting.concurrency}."
        )
    return (
        f"{idle}: they wait for each other. More staleness, over-sampling or a larger batch "
        "would let more groups run."
    )
