"""`rolloutmq simulate`: estimate how busy workers and trainer would be, before they are rented."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import orjson
import typer
from rich.table import Table

from producer_workers.simulation.advice import Advice, Simulated, as_config, name_of
from rolloutmq.command_list import command
from rolloutmq.output import console as open_console

if TYPE_CHECKING:
    from producer_workers.simulation.lengths import Lengths


EPILOG = """
\b
Example: rolloutmq simulate --workers 8 --median 2000 --sigma 1 --step-s 60
         rolloutmq simulate --workers 8 --median 1500 --long 16000
         rolloutmq simulate --workers 32 --trace lengths.jsonl --pause keep
         rolloutmq simulate --workers 8 --plot idle.png --json | jq .chosen

\b
A line of a trace is one response: 812, {"tokens": 812} or {"seconds": 9.5}.
Waste: tokens of groups that expired, or generated again after an update.
"""

_PAUSE = (
    "What an update does to running groups: keep, partial (abort, and resume "
    "their tokens), abort or drain"
)
Workers = Annotated[
    int, typer.Option(min=1, max=1024, help="Rollout workers, with one engine each.")
]
Sequences = Annotated[
    int, typer.Option(min=1, max=65_536, help="Sequences that an engine generates concurrently.")
]
Concurrency = Annotated[
    int | None,
    typer.Option(
        min=1, max=1024, help="Groups that a worker holds.  [default: as many as its engine fits]"
    ),
]
GroupSize = Annotated[int, typer.Option(min=1, max=4096, help="Rollouts per prompt.")]
BatchSize = Annotated[int, typer.Option(min=1, max=1024, help="Groups per train step.")]
Median = Annotated[
    float,
    typer.Option(
        min=1, max=10_000_000, help="Tokens per response: median of a lognormal distribution."
    ),
]
Sigma = Annotated[
    float,
    typer.Option(min=0, max=10, help="Sigma of that distribution: 0.5 is mild, 1 has a long tail."),
]
Long = Annotated[
    int | None,
    typer.Option(
        "--long", min=1, max=10_000_000, help="Use two lengths instead: --median and this one."
    ),
]
LongShare = Annotated[
    float, typer.Option(min=0, max=1, help="Share of responses with the length --long.")
]
Longest = Annotated[
    int, typer.Option(min=1, max=10_000_000, help="Length at which responses are cut off.")
]
Trace = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="JSONL file with lengths or latencies that you measured."),
]
TokensPerS = Annotated[
    float,
    typer.Option(
        min=0.001, max=1_000_000, help="Tokens per second of one sequence in a busy engine."
    ),
]
FirstTokenS = Annotated[
    float, typer.Option(min=0, max=1_000_000, help="Seconds to the first token of a request.")
]
StepS = Annotated[float, typer.Option(min=0, max=1_000_000, help="Seconds per train step.")]
SyncS = Annotated[
    float,
    typer.Option(
        min=0,
        max=1_000_000,
        help="Seconds per weight update, during which workers and trainer wait.",
    ),
]
SyncInterval = Annotated[
    int, typer.Option(min=1, max=1_000_000, help="Train steps between two weight updates.")
]
Staleness = Annotated[
    list[int] | None,
    typer.Option(min=0, max=1_000_000, help="max_staleness; repeatable.  [default: 0, 1, 2, 4]"),
]
Pause = Annotated[
    list[str] | None, typer.Option(help=f"{_PAUSE}; repeatable.  [default: all but drain]")
]
OverSample = Annotated[
    float, typer.Option(min=0, max=10_000, help="Groups beyond the batch, as a share of it.")
]
Steps = Annotated[int, typer.Option(min=1, max=100_000, help="Train steps to simulate.")]
Seed = Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Seed of the lengths.")]
Plot = Annotated[Path | None, typer.Option(metavar="FILE", help="Also write a chart (PNG, SVG).")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@command("Run", "simulate", epilog=EPILOG)
def simulate(
    workers: Workers,
    sequences: Sequences = 64,
    concurrency: Concurrency = None,
    group_size: GroupSize = 8,
    batch_size: BatchSize = 64,
    median: Median = 2000,
    sigma: Sigma = 0.8,
    long_tokens: Long = None,
    long_share: LongShare = 0.05,
    longest: Longest = 16_384,
    trace: Trace = None,
    tokens_per_s: TokensPerS = 40,
    first_token_s: FirstTokenS = 0.5,
    step_s: StepS = 60,
    sync_s: SyncS = 2,
    sync_interval: SyncInterval = 1,
    staleness: Staleness = None,
    pause: Pause = None,
    over_sample: OverSample = 0.0,
    steps: Steps = 40,
    seed: Seed = 0,
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """Simulate a fleet and a trainer with your numbers.

    Needs no server and no GPU. Prints throughput, idle shares, staleness and waste of each setting,
    and recommends one, with the reasons.
    """
    from pydantic import ValidationError

    from buffer.errors import ConfigError
    from producer_workers.simulation.advice import advise
    from producer_workers.simulation.event_model import simulate as run_model
    from producer_workers.simulation.lengths import trace_lengths
    from producer_workers.simulation.setting import Setting, candidates

    try:
        fleet = Setting(
            workers=workers,
            sequences=sequences,
            concurrency=concurrency or max(1, sequences // group_size),
            group_size=group_size,
            batch_size=batch_size,
            token_s=1 / tokens_per_s,
            first_token_s=first_token_s,
            step_s=step_s,
            sync_s=sync_s,
            sync_weights_interval=sync_interval,
            over_sample_threshold=over_sample,
        )
        settings = candidates(
            fleet, staleness or [0, 1, 2, 4], pause or ["keep", "partial", "abort"]
        )
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"{first['loc'][0]}: {first['msg']}, not {first['input']!r}") from error
    if trace:
        lengths = trace_lengths(trace, fleet.token_s, group_size, seed=seed)
    else:
        lengths = _drawn(median, sigma, long_tokens, long_share, longest, group_size, seed)
    outcomes = [(setting, run_model(setting, lengths, steps)) for setting in settings]
    advice = advise(outcomes)
    if plot:
        draw(outcomes, advice, plot)
    (write_json if as_json else print_report)(outcomes, advice)


def _drawn(
    median: float,
    sigma: float,
    long: int | None,
    long_share: float,
    longest: int,
    group_size: int,
    seed: int,
) -> Lengths:
    from producer_workers.config.engine import Bimodal, Distribution, LogNormal
    from producer_workers.simulation.lengths import drawn_lengths

    distribution: Distribution = LogNormal(median=median, sigma=sigma)
    if long is not None:
        distribution = Bimodal(short=median, long=long, long_share=long_share)
    return drawn_lengths(distribution, group_size, longest=longest, seed=seed)


def print_report(outcomes: Sequence[Simulated], advice: Advice) -> None:
    """Print a line per setting with the chosen one marked, the reasons, and its config."""
    numbers = ("step s", "tokens/s", "idle", "trainer idle", "staleness", "oldest", "waste")
    table = Table("", "max", "update", *numbers, box=None, pad_edge=False, header_style="dim")
    for place, column in enumerate(table.columns):
        column.justify = "left" if place < 3 else "right"
        column.no_wrap = True
    for place, (setting, outcome) in enumerate(outcomes):
        is_chosen = place == advice.chosen
        table.add_row(
            ">" if is_chosen else "",
            str(setting.max_staleness),
            setting.interruption,
            f"{outcome.seconds / outcome.steps:,.1f}",
            f"{outcome.tokens_per_s:,.0f}",
            f"{outcome.worker_idle:.1%}",
            f"{outcome.trainer_idle:.1%}",
            f"{outcome.mean_staleness:.2f}",
            str(max(outcome.staleness, default=0)),
            f"{outcome.waste:.1%}",
            style="bold" if is_chosen else None,
        )
    console = open_console()
    console.print(table)
    for reason in advice.reasons:
        console.print(f"\n{reason}")
    console.print(f"\n{as_config(outcomes[advice.chosen][0])}")


def write_json(outcomes: Sequence[Simulated], advice: Advice) -> None:
    rows = [
        setting.model_dump()
        | outcome.summary()
        | {"staleness": {str(age): n for age, n in outcome.staleness.items()}}
        for setting, outcome in outcomes
    ]
    document = {
        "settings": rows,
        "chosen": rows[advice.chosen],
        "reasons": advice.reasons,
        "workers_wanted": advice.workers_wanted,
    }
    typer.echo(orjson.dumps(document, option=orjson.OPT_INDENT_2).decode())


def draw(outcomes: Sequence[Simulated], advice: Advice, file: Path) -> None:
    """Draw throughput, idle shares and waste of each setting. Raises OSError."""
    from matplotlib.figure import Figure

    names = [
        name_of(setting) + (" (chosen)" if n == advice.chosen else "")
        for n, (setting, _) in enumerate(outcomes)
    ]
    figure = Figure(figsize=(11, 1.5 + 0.35 * len(names)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    left.barh(names, [outcome.tokens_per_s for _, outcome in outcomes], color="tab:blue")
    left.set_xlabel("trained tokens per second")
    left.invert_yaxis()
    places = range(len(names))
    shares = {"workers idle": "worker_idle", "trainer idle": "trainer_idle", "waste": "waste"}
    for number, (label, name) in enumerate(shares.items()):
        values = [getattr(outcome, name) for _, outcome in outcomes]
        right.barh(
            [place + 0.27 * (number - 1) for place in places], values, height=0.25, label=label
        )
    right.set_xlabel("share")
    right.legend()
    figure.savefig(file, dpi=110)
