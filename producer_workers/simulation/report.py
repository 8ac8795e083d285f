"""What `rolloutmq simulate` says: a table and its advice for people, one JSON document for programs, a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import orjson
import typer
from rich.table import Table

from buffer.commands import screen
from producer_workers.simulation.advice import Advice, Simulated, as_config, name_of


def print_report(outcomes: Sequence[Simulated], advice: Advice) -> None:
    """One line for each setting, the chosen one marked; then why, and as a config says it."""
    numbers = ("step s", "tokens/s", "idle", "trainer idle", "staleness", "oldest", "waste")
    table = Table("", "max", "update", *numbers, box=None, pad_edge=False, header_style="dim")
    for place, column in enumerate(table.columns):
        column.justify, column.no_wrap = "left" if place < 3 else "right", True
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
    console = screen.console()
    console.print(table)
    for reason in advice.reasons:
        console.print(f"\n{reason}")
    console.print(f"\n{as_config(outcomes[advice.chosen][0])}")


def write_json(outcomes: Sequence[Simulated], advice: Advice) -> None:
    """Settings with their figures, the chosen one, why, and how many workers would keep the trainer busy."""
    rows = [
        setting.model_dump() | outcome.summary() | {"staleness": {str(age): n for age, n in outcome.staleness.items()}}
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
    """Throughput of each setting, and what both sides idle and waste. Raises OSError."""
    from matplotlib.figure import Figure

    names = [name_of(setting) + (" (chosen)" if n == advice.chosen else "") for n, (setting, _) in enumerate(outcomes)]
    figure = Figure(figsize=(11, 1.5 + 0.35 * len(names)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    left.barh(names, [outcome.tokens_per_s for _, outcome in outcomes], color="tab:blue")
    left.set_xlabel("trained tokens per second")
    left.invert_yaxis()
    places = range(len(names))
    shares = {"workers idle": "worker_idle", "trainer idle": "trainer_idle", "waste": "waste"}
    for number, (label, name) in enumerate(shares.items()):
        values = [getattr(outcome, name) for _, outcome in outcomes]
        right.barh([place + 0.27 * (number - 1) for place in places], values, height=0.25, label=label)
    right.set_xlabel("share")
    right.legend()
    figure.savefig(file, dpi=110)
