"""`rolloutmq simulate`: estimate how busy workers and trainer would be, before they are rented."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Annotated

from rich.console import RenderableType
from typer import Option

from producer_workers.simulation.advice import Advice, Simulated, as_config
from rolloutmq.command_list import command
from rolloutmq.options import AsJson, Output
from rolloutmq.output import table

if TYPE_CHECKING:
    from producer_workers.simulation.server_load import Machine, ServerLoad

EPILOG = """
\b
Example: rolloutmq simulate --workers 8 --median 2000 --sigma 1 --step-s 60
         rolloutmq simulate --workers 32 --trace lengths.jsonl --pause keep
         rolloutmq simulate --workers 8 --json | jq .chosen
         rolloutmq simulate --size --workers 64 --median 8000 --longest 32768

\b
A line of a trace is one response: 812, {"tokens": 812} or {"seconds": 9.5}.
Limits: max_ahead, max_staleness. Idle: workers, then the trainer.
Waste: tokens of groups that expired, or generated again after an update.
Length: mean length of trained responses, as a share of that of started ones.
Tail: the same above the started p95. Below 1, the model learns to be short.
"""

_PAUSE = (
    "What an update does to running groups: keep, partial (abort, and resume "
    "their tokens), abort or drain"
)
_MOST = 1_000_000
Concurrency = Annotated[
    int | None,
    Option(
        min=1, max=1024, help="Groups that a worker holds.  [default: as many as its engine fits]"
    ),
]
Median = Annotated[
    float, Option(min=1, max=_MOST, help="Tokens per response: median of a lognormal distribution.")
]
Sigma = Annotated[
    float, Option(min=0, max=10, help="Sigma of that distribution: 0.5 is mild, 1 has a long tail.")
]
Trace = Annotated[
    Path | None,
    Option(metavar="FILE", help="JSONL file with lengths or latencies that you measured."),
]
TokensPerS = Annotated[
    float, Option(min=0.001, max=_MOST, help="Tokens per second of one sequence in a busy engine.")
]
FirstTokenS = Annotated[
    float, Option(min=0, max=_MOST, help="Seconds to the first token of a request.")
]
SyncS = Annotated[
    float,
    Option(
        min=0, max=_MOST, help="Seconds per weight update, during which workers and trainer wait."
    ),
]
Staleness = Annotated[
    list[int] | None,
    Option(min=0, max=_MOST, help="max_staleness; repeatable.  [default: 0, 1, 16]"),
]
Ahead = Annotated[
    list[int] | None, Option(min=0, max=_MOST, help="max_ahead; repeatable.  [default: 1, 2, 4]")
]
OnStraggler = Annotated[
    list[str] | None,
    Option(
        help="What happens to groups that take too long: wait, drop or retry; repeatable.  "
        "[default: wait]"
    ),
]
Prompt = Annotated[int, Option(min=0, max=_MOST, help="For --size: tokens of a prompt.")]
MemoryGb = Annotated[
    float, Option(min=0.1, max=_MOST, help="For --size: memory of the server, GB.")
]
NetworkGbit = Annotated[
    float, Option(min=0.01, max=_MOST, help="For --size: its network, Gbit/s in each direction.")
]
DiskMb = Annotated[
    float, Option(min=0.1, max=_MOST, help="For --size: what its disk writes, MB/s.")
]
Pause = Annotated[list[str] | None, Option(help=f"{_PAUSE}; repeatable.  [default: all but drain]")]


def _count(most: int, text: str) -> object:
    return Option(min=1, max=most, help=text)


@command("simulate", epilog=EPILOG)
def simulate(
    workers: Annotated[int, _count(1024, "Rollout workers, with one engine each.")],
    sequences: Annotated[int, _count(65_536, "Sequences that an engine generates at once.")] = 64,
    concurrency: Concurrency = None,
    group_size: Annotated[int, _count(4096, "Rollouts per prompt.")] = 8,
    batch_size: Annotated[int, _count(1024, "Groups per train step.")] = 64,
    median: Median = 2000,
    sigma: Sigma = 0.8,
    longest: Annotated[int, _count(_MOST, "Length at which responses are cut off.")] = 16_384,
    trace: Trace = None,
    tokens_per_s: TokensPerS = 40,
    first_token_s: FirstTokenS = 0.5,
    step_s: Annotated[float, Option(min=0, max=_MOST, help="Seconds per train step.")] = 60,
    sync_s: SyncS = 2,
    sync_interval: Annotated[int, _count(_MOST, "Train steps between two weight updates.")] = 1,
    staleness: Staleness = None,
    ahead: Ahead = None,
    on_straggler: OnStraggler = None,
    pause: Pause = None,
    over_sample: Annotated[
        float, Option(min=0, max=10_000, help="Groups beyond the batch, as a share of it.")
    ] = 0.0,
    steps: Annotated[int, _count(100_000, "Train steps to simulate.")] = 40,
    size: Annotated[
        bool, Option("--size", help="Size the Redis server for this fleet; simulate nothing.")
    ] = False,
    prompt: Prompt = 512,
    memory_gb: MemoryGb = 16,
    network_gbit: NetworkGbit = 10,
    disk_mb: DiskMb = 500,
    as_json: AsJson = False,
) -> None:
    """Simulate a fleet and a trainer with your numbers.

    Needs no server and no GPU. Prints throughput, idle shares, staleness and waste of each setting,
    and recommends one, with the reasons. With --size, prints instead what the fleet asks of the
    Redis or Valkey server, and how many such workers one server carries.
    """
    from pydantic import ValidationError

    from buffer.errors import ConfigError
    from producer_workers.config.distribution import LogNormal
    from producer_workers.simulation.advice import advise
    from producer_workers.simulation.event_model import simulate as run_model
    from producer_workers.simulation.server_load import Machine, server_load
    from producer_workers.simulation.setting import (
        Setting,
        candidates,
        drawn_lengths,
        picked_lengths,
        read_trace,
    )

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
            fleet,
            staleness or [0, 1, 16],
            pause or ["keep", "partial", "abort"],
            ahead or [1, 2, 4],
            on_straggler or ["wait"],
        )
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"{first['loc'][0]}: {first['msg']}, not {first['input']!r}") from error
    if trace:
        lengths = picked_lengths(read_trace(trace, fleet.token_s), group_size, seed=0)
    else:
        drawn = LogNormal(median=median, sigma=sigma)
        lengths = drawn_lengths(drawn, group_size, longest=longest, seed=0)
    if size:
        load = server_load(
            workers=workers,
            tokens_per_s=tokens_per_s * sequences,
            samples=group_size,
            prompt=prompt,
            response=mean(length for draw in range(1000) for length in lengths(draw)),
            batch=batch_size,
        )
        machine = Machine(memory_gb * 1e9, network_gbit * 1e9 / 8, disk_mb * 1e6)
        _sized(load, machine).print(as_json=as_json)
        return
    outcomes = [(setting, run_model(setting, lengths, steps)) for setting in settings]
    _answer(outcomes, advise(outcomes)).print(as_json=as_json)


def _answer(outcomes: Sequence[Simulated], advice: Advice) -> Output:
    """Return a line per setting with the chosen one marked, the reasons, and its config."""
    numbers = ("step s", "idle", "trainer", "staleness", "waste", "length", "tail")
    grid = table("", "limits", "update", *numbers, right=numbers)
    rows = []
    for place, (setting, outcome) in enumerate(outcomes):
        is_chosen = place == advice.chosen
        straggler = setting.on_straggler
        grid.add_row(
            ">" if is_chosen else "",
            f"{setting.max_ahead}, {setting.max_staleness}",
            setting.interruption + ("" if straggler == "wait" else f", {straggler}"),
            f"{outcome.seconds / outcome.steps:,.1f}",
            f"{outcome.worker_idle:.1%}",
            f"{outcome.trainer_idle:.1%}",
            f"{outcome.mean_staleness:.2f} to {max(outcome.staleness, default=0)}",
            f"{outcome.waste:.1%}",
            f"{outcome.length_ratio:.2f}",
            f"{outcome.tail_ratio:.2f}",
            style="bold" if is_chosen else None,
        )
        ages = {"staleness": dict(outcome.staleness)}
        rows.append(setting.model_dump() | outcome.summary() | ages)
    document = {
        "settings": rows,
        "chosen": rows[advice.chosen],
        "reasons": advice.reasons,
        "workers_wanted": advice.workers_wanted,
    }
    reasons: list[RenderableType] = [f"\n{reason}" for reason in advice.reasons]
    return Output(document, [grid, *reasons, f"\n{as_config(outcomes[advice.chosen][0])}"])


def _sized(load: ServerLoad, machine: Machine) -> Output:
    """Return what the fleet asks of each part of the server, and what is full first."""
    shares = load.shares(machine)
    first, most = next(iter(shares)), load.most_workers(machine)
    document = asdict(load) | {"shares": shares, "full_first": first, "most_workers": most}
    fits = "fits" if load.memory <= machine.memory else "does not fit: fewer groups, or more memory"
    mb = 1e6
    lines = [
        f"groups      {load.groups_per_s:,.2f} per second of {load.group_bytes / mb:,.2f} MB",
        f"processor   {load.cores:.1%} of the one core that a server uses",
        f"memory      {load.memory / 1e9:,.2f} GB of {machine.memory / 1e9:g}: {fits}",
        f"network     {load.received / mb:,.1f} MB/s in, {load.sent / mb:,.1f} MB/s out",
        f"disk        {load.written / mb:,.1f} MB/s, {load.calls:,.0f} writing calls per second",
        f"full first  {first}, at {most:,} such workers ({load.workers:,}: {shares[first]:.1%})",
    ]
    return Output(document, lines)
