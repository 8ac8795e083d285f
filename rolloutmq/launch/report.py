"""Report the outcome of a run: accuracy before and after, the account, useful commands."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from buffer.errors import AccountError
from buffer.ledger.account import FsckReport
from buffer.run.run import Run
from consumer.handle.step_log import Evaluations, read_evaluations
from rolloutmq.config.config import Config
from rolloutmq.output import table
from rolloutmq.views.run_folder import RunFolder
from rolloutmq.views.screen import groups_table
from rolloutmq.web.report import write_report


def finish(console: Console, config: Config, run: Run, where: str) -> str:
    """Print the outcome, write the report, return the account in one line. Raises AccountError.

    `where`: the options by which other commands find the run.
    """
    folder = config.run.folder
    audit = run.account.fsck()
    evaluations = read_evaluations(folder)
    if evaluations:
        console.print(accuracy_table(evaluations))
    console.print(groups_table(audit.tasks))
    twice = RunFolder(folder).log.trained_twice()
    style = "green" if audit.clean and not twice else "bold red"
    console.print(f"{account_line(audit)} · trained twice {len(twice)}", style=style)
    page = folder / "report.html"
    if write_report(folder, page, account_line(audit)):
        console.print(f"report: {page}   steps: {folder / 'steps.jsonl'}", soft_wrap=True)
    console.print(f"logs: {folder / 'logs'}", soft_wrap=True)
    _print_commands(console, run, where)
    if not audit.clean or twice:
        what = [*audit.faults, *audit.lost[:5], *audit.doubled[:5], *list(twice)[:5]]
        raise AccountError("the account does not add up", hint="; ".join(what))
    return account_line(audit)


def account_line(audit: FsckReport) -> str:
    faults = f" · {audit.faults[0]}" if audit.faults else ""
    return f"account: lost {len(audit.lost)} · in two stages {len(audit.doubled)}{faults}"


def accuracy_table(evaluations: Evaluations) -> Table:
    """Return the accuracy before the first step and at the newest evaluation, and what it is of."""
    names = ("before", "after", "step", "change", "problems", "failed", "weights", "temperature")
    grid = table("held-out accuracy", *names, right=names)
    for task in sorted({task for task, _ in evaluations}):
        step = max(step for name, step in evaluations if name == task)
        first, then = evaluations.get((task, 0), {}), evaluations[task, step]
        before, after = (each.get("eval/accuracy") for each in (first, then))
        old, new = ("-" if value is None else f"{value:.3f}" for value in (before, after))
        change = "-" if before is None or after is None else f"{after - before:+.3f}"
        failed = then.get("eval/failed", 0.0)
        # those of a background evaluation may be of several versions
        ends = [then.get(f"eval/{end}_version", step) for end in ("oldest", "newest")]
        weights = " to ".join(f"{version:.0f}" for version in dict.fromkeys(ends))
        temperature = then.get("eval/temperature")
        how = "-" if temperature is None else f"{temperature:g}" if temperature else "0, greedy"
        problems = f"{then.get('eval/groups', 0.0) + failed:.0f}"
        grid.add_row(task, old, new, str(step), change, problems, f"{failed:.0f}", weights, how)
    return grid


def activation() -> str:
    """Return how to make `rolloutmq` a command of the shell; "" if it is one."""
    activate = Path(sys.prefix) / "bin" / "activate"
    return f"source {activate}" if activate.exists() and not shutil.which("rolloutmq") else ""


def _print_commands(console: Console, run: Run, where: str) -> None:
    console.print("\nto open the run again:")
    commands = [activation()] if activation() else []
    dead = ("dead",) if len(run.dead_letters) else ()
    names = ("web", "status", *dead, "ls", "logs events", "fsck")
    commands += [f"rolloutmq {name} {where}" for name in names]
    for command in commands:
        console.print(f"  {command}", highlight=False, soft_wrap=True, markup=False)
