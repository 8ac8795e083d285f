"""`python -m benchmarks.fairness`: which lengths are trained, and what that costs.

The event model of `rolloutmq simulate`, and three of its cases as real runs, with a server, a
producer and simulated engines in processes of their own. A share counts what was trained of what
was started and ended: groups that still run at the end are in neither number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import typer
from numpy.typing import NDArray

from benchmarks.asked import machine
from benchmarks.idle import play
from benchmarks.machine import machine_facts
from benchmarks.report import fill_in
from benchmarks.server import BenchServer, durable_server
from producer_workers.simulation.event_model import REDRAWN, simulate
from producer_workers.simulation.setting import Lengths, Outcome, Setting

MODEL = Setting(
    workers=16,
    sequences=64,
    concurrency=8,
    group_size=8,
    batch_size=64,
    token_s=1 / 40,
    first_token_s=0.5,
    step_s=0.0,
    sync_s=2.0,
)
MEDIAN, LONGEST = 2000, 32_768  # tokens

REAL = MODEL.model_copy(
    update={"workers": 4, "sequences": 32, "group_size": 4, "batch_size": 16, "first_token_s": 0.04}
    | {"token_s": 0.04, "sync_s": 0.0}
)
REAL_SCALE = 20  # real runs are that much shorter: 100 tokens for 2000, a second for 12.5
REAL_STEPS = 40

WAYS: dict[str, dict[str, object]] = {
    "drop": {"on_straggler": "drop", "max_staleness": 8},
    "retry": {"on_straggler": "retry", "max_staleness": 8},
    "wait": {"on_straggler": "wait", "max_staleness": 8},
    "default": {"on_straggler": "wait", "max_staleness": 16},
}
"""Groups start one publication ahead in all of them."""

REGIMES = {"trainer-bound": 2.0, "balanced": 1.0, "generation-bound": 0.1}
"""The time of a train step over the time in which the fleet alone makes a batch."""

Draw = Callable[[np.random.Generator, int], NDArray[np.float64]]


def lognormal(sigma: float) -> Draw:
    return lambda rng, count: MEDIAN * np.exp(sigma * rng.standard_normal(count))


def pareto(rng: np.random.Generator, count: int) -> NDArray[np.float64]:
    alpha = 1.2
    ranks: NDArray[np.float64] = 1 - rng.random(count)
    return MEDIAN / 2 ** (1 / alpha) * ranks ** (-1 / alpha)


def twenty_times(rng: np.random.Generator, count: int) -> NDArray[np.float64]:
    factors: NDArray[np.float64] = np.where(rng.random(count) < 0.05, 20.0, 1.0)
    return factors * lognormal(0.3)(rng, count)


DRAWS: dict[str, Draw] = {
    "lognormal 1.0": lognormal(1.0),
    "lognormal 1.3": lognormal(1.3),
    "lognormal 1.6": lognormal(1.6),
    "Pareto 1.2": pareto,
    "5 % times 20": twenty_times,
}
SHOWN = [*((name, "prompt") for name in DRAWS), ("5 % times 20", "rollout")]
OTHERS = [(name, "rollout") for name in DRAWS if name != "5 % times 20"]
PLAYED = ("lognormal 1.0", "Pareto 1.2", "5 % times 20")


def drawn(name: str, source: str, group_size: int, scale: int = 1) -> Lengths:
    """Return lengths that each rollout draws, or its prompt: then rollouts differ by a tenth."""
    draw_from = DRAWS[name]

    @cache
    def lengths(draw: int) -> list[int]:
        if source == "rollout":
            tokens = draw_from(np.random.default_rng([2, draw]), group_size)
        else:
            (prompt,) = draw_from(np.random.default_rng([1, draw % REDRAWN]), 1)
            own = np.random.default_rng([3, draw]).standard_normal(group_size)
            tokens = prompt * np.exp(0.1 * own)
        return [max(1, int(n) // scale) for n in np.clip(tokens, 1, LONGEST)]

    return lengths


class Row(NamedTuple):
    """`shares`: trained of started, in each tenth of the started lengths, from p95 and from p99."""

    way: str
    step_s: float
    shares: list[float]


def row(way: str, outcome: Outcome) -> Row:
    trained = np.sort(outcome.trained_lengths)
    started = np.sort([*outcome.trained_lengths, *outcome.expired_lengths])
    bounds = np.quantile(started, [*np.arange(10) / 10, 0.95, 0.99])

    def between(low: float, high: float) -> float:
        of_trained, of_started = (
            int(np.searchsorted(lengths, high) - np.searchsorted(lengths, low))
            for lengths in (trained, started)
        )
        return of_trained / of_started if of_started else 1.0

    ends = [*bounds[1:10], np.inf, np.inf, np.inf]
    shares = [between(low, high) for low, high in zip(bounds, ends, strict=True)]
    return Row(way, outcome.seconds / outcome.steps, shares)


def settings_of(fleet: Setting, lengths: Lengths, regime: str) -> dict[str, Setting]:
    """Return the settings of all ways, with the step time of a regime."""
    alone = simulate(fleet.model_copy(update=WAYS["default"]), lengths, 100)
    step_s = REGIMES[regime] * alone.seconds / alone.steps
    return {way: fleet.model_copy(update=more | {"step_s": step_s}) for way, more in WAYS.items()}


def modelled(steps: int, cases: Sequence[tuple[str, str]]) -> Iterator[tuple[str, str, list[Row]]]:
    for name, source in cases:
        lengths = drawn(name, source, MODEL.group_size)
        for regime in REGIMES:
            ways = settings_of(MODEL, lengths, regime)
            found = [row(way, simulate(ways[way], lengths, steps)) for way in WAYS]
            yield f"{name}, by {source}", regime, found


def played(server: BenchServer, steps: int) -> Iterator[tuple[str, str, list[Row]]]:
    """Play real runs of one length after the other, all ways at once.

    Without retry: a group that was trained in the end does not tell what it had lost.
    """
    regime, ways = "generation-bound", ("drop", "wait", "default")
    with ThreadPoolExecutor(len(ways)) as pool:
        for number, name in enumerate(PLAYED):
            lengths = drawn(name, "prompt", REAL.group_size, REAL_SCALE)
            found = settings_of(REAL, lengths, regime)
            runs = {
                way: pool.submit(play, server, found[way], lengths, steps, f"fair-{number}-{way}")
                for way in ways
            }
            yield f"{name}, by prompt", regime, [row(way, runs[way].result()) for way in ways]


def trains_all(group: Sequence[Row]) -> bool:
    return min(share for each in group for share in each.shares) >= 0.995


def table(found: Sequence[tuple[str, str, list[Row]]]) -> list[str]:
    lines = [
        "| lengths, regime | | step / drop | longest tenth | p95 | p99 |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for lengths, regime, group in found:
        for number, (way, step_s, shares) in enumerate(group):
            shown = [f"{share:.2f}" for share in shares[9:]]
            said = f"{lengths}, {regime}" if number == 0 else ""
            cells = [said, way, f"{step_s / group[0].step_s:.2f}"]
            lines.append(f"| {' | '.join([*cells, *shown])} |")
    return lines


def main(
    steps: Annotated[int, typer.Option(help="train steps of each simulated run")] = 200,
    real_steps: Annotated[int, typer.Option(help="train steps of each real run")] = REAL_STEPS,
    write: Annotated[bool, typer.Option("--write", help="put the tables into README")] = False,
) -> None:
    """Print which lengths each way trains, in three regimes."""
    cases = [*modelled(steps, SHOWN)]
    shown = table([case for case in cases if not trains_all(case[2])])
    alike = [group for _, _, group in cases if trains_all(group)]
    ratios = [each.step_s / group[0].step_s for group in alike for each in group]
    others = [*modelled(steps, OTHERS)]
    new = [each for _, _, group in others for each in group if each.way == "default"]
    worst = min(min(each.shares) for each in new)
    slowest = max(group[-1].step_s / group[0].step_s for _, _, group in others)
    with durable_server() as server:
        real = table([*played(server, real_steps)])
    nine = min(min(each.shares[:9]) for _, _, group in cases for each in group)
    lines = [
        *shown,
        "",
        f"Of the nine shorter tenths of the lengths, all ways train at least {nine:.2f}. "
        f"In the {len(alike)} other cases, all four ways train every length, "
        f"in {min(ratios):.2f} to {max(ratios):.2f} times the time of drop. Where lengths differ "
        f"by rollout, the default trains at least {worst:.2f} of each tenth, "
        f"in at most {slowest:.2f} of that time. Real runs:",
        "",
        *real,
        "",
        machine(machine_facts()),
    ]
    print("\n".join(lines))
    if write:
        mark = "fairness: written by `python -m benchmarks.fairness --write`"
        fill_in(Path(__file__).parent / "README.md", mark, lines)


if __name__ == "__main__":
    typer.run(main)
