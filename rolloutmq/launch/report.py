"""Report the outcome of a run: accuracy before and after, a plot, the account, useful commands."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from buffer.errors import AccountError
from buffer.ledger.account import FsckReport
from buffer.redis.connection.url import mask_url
from buffer.run import Run
from consumer.grpo.reporting.step_log import Evaluations, StepLog, TrainedStep, read_evaluations
from rolloutmq.config.config import Config


def plot(steps: list[TrainedStep], evaluations: Evaluations, file: Path) -> None:
    """Plot reward, staleness and held-out accuracy by train step, as a PNG."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    numbers = [s.step for s in steps]
    figure, (upper, lower) = plt.subplots(2, 1, figsize=(8, 6), sharex=True, height_ratios=(2, 1))
    rewards = [s.metrics.get("rewards/mean", float("nan")) for s in steps]
    upper.plot(numbers, rewards, color="#9bb7d4", linewidth=1, label="reward of the batch")
    upper.plot(
        numbers, _smooth(rewards), color="#1f5fa8", linewidth=2, label="mean of the last 10 steps"
    )
    for place, task in enumerate(sorted({task for task, _ in evaluations})):
        points = sorted(
            (step, m["eval/accuracy"]) for (t, step), m in evaluations.items() if t == task
        )
        upper.plot(
            *zip(*points, strict=True),
            "o--",
            color=f"C{place + 1}",
            label=f"held-out accuracy, {task}",
        )
    upper.set_ylabel("reward, accuracy")
    upper.set_ylim(-0.02, 1.02)
    upper.legend(loc="lower right")
    upper.grid(alpha=0.3)
    lower.step(
        numbers, [s.metrics.get("staleness/mean", 0.0) for s in steps], where="mid", label="mean"
    )
    lower.step(
        numbers,
        [s.metrics.get("staleness/max", 0.0) for s in steps],
        where="mid",
        label="max",
        alpha=0.6,
    )
    lower.set_ylabel("staleness (train steps)")
    lower.set_xlabel("train step")
    lower.legend(loc="upper right")
    lower.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    plt.close(figure)


def _smooth(values: list[float], window: int = 10) -> list[float]:
    return [
        sum(part) / len(part)
        for i in range(len(values))
        if (part := values[max(0, i + 1 - window) : i + 1])
    ]


def finish(console: Console, config: Config, run: Run, server_cli: str | None) -> str:
    """Print the outcome of a run and write its plot; return its account in one line.

    Raises AccountError if the account does not add up.
    """
    folder = config.run.folder
    audit = run.account.fsck()
    log = StepLog(folder / "steps.jsonl")
    log.read_new()
    evaluations = read_evaluations(folder)
    plot(log.steps, evaluations, folder / "report.png")
    if evaluations:
        console.print(accuracy_table(evaluations))
    console.print(_account_table(audit))
    twice = log.trained_twice()
    style = "green" if audit.clean and not twice else "bold red"
    console.print(f"{account_line(audit)} · trained twice {len(twice)}", style=style)
    console.print(
        f"plot: {folder / 'report.png'}   steps: {folder / 'steps.jsonl'}   logs: {folder / 'logs'}"
    )
    _print_commands(console, config, run, server_cli)
    if not audit.clean or twice:
        what = [*audit.faults, *audit.lost[:5], *audit.doubled[:5], *list(twice)[:5]]
        raise AccountError("the account does not add up", hint="; ".join(what))
    return account_line(audit)


def account_line(audit: FsckReport) -> str:
    """Return what `rolloutmq fsck` found, in one line."""
    faults = f" · {audit.faults[0]}" if audit.faults else ""
    return f"account: lost {len(audit.lost)} · in two places {len(audit.doubled)}{faults}"


def accuracy_table(evaluations: Evaluations) -> Table:
    """Return the accuracy before the first step and after the newest one that was evaluated."""
    table = Table(title="held-out accuracy (greedy)", title_justify="left", show_edge=False)
    for column in ("task", "before", "after", "step", "change", "problems"):
        table.add_column(column, justify="left" if column == "task" else "right")
    for task in sorted({task for task, _ in evaluations}):
        step = max(step for name, step in evaluations if name == task)
        before = evaluations.get((task, 0), {}).get("eval/accuracy")
        then = evaluations[task, step]
        after = then["eval/accuracy"]
        table.add_row(
            task,
            "-" if before is None else f"{before:.3f}",
            f"{after:.3f}",
            str(step),
            "-" if before is None else f"{after - before:+.3f}",
            f"{then['eval/rollouts']:.0f}",
        )
    return table


def _account_table(audit: FsckReport) -> Table:
    places = list(audit.tasks[0].stages)
    table = Table(title="groups by stage (fsck)", title_justify="left", show_edge=False)
    for column in ("stage", *(task.task for task in audit.tasks)):
        table.add_column(column, justify="left" if column == "stage" else "right")
    for place in places:
        counts = [task.stages[place] for task in audit.tasks]
        if any(counts):
            table.add_row(place, *map(str, counts))
    table.add_section()
    table.add_row("enqueued", *(str(task.enqueued) for task in audit.tasks), style="bold")
    return table


def activation() -> str:
    """Return what makes `rolloutmq` a command of the shell; "" if it is one, or was installed."""
    activate = Path(sys.prefix) / "bin" / "activate"
    return f"source {activate}" if activate.exists() and not shutil.which("rolloutmq") else ""


def _print_commands(console: Console, config: Config, run: Run, server_cli: str | None) -> None:
    url = mask_url(run.store.url)
    where = f"--run-dir {config.run.folder}" if server_cli else f"--redis-url {url}"
    keys = run.keys
    console.print("\nto inspect the run:")
    commands = [activation()] if activation() else []
    # the embedded server stops with this command; its data stays on disk
    commands += [f"rolloutmq server {where}"] if server_cli else []
    commands += [f"rolloutmq {c} {where}" for c in ("status", "ls", "tail --from-start", "fsck")]
    cli = server_cli or f"redis-cli -u {url}"
    commands += [f"{cli} HGETALL '{keys.control}'", f"{cli} XREVRANGE '{keys.events}' + - COUNT 5"]
    for command in commands:
        console.print(f"  {command}", highlight=False, soft_wrap=True, markup=False)
