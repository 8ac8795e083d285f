"""`rolloutmq fsck`: check, on a live run, that nothing is lost and nothing was trained twice.

Three checks: the totals at one instant add up (I1); each draw is in exactly one place; no group
is in two manifests or, if the trainer's `steps.jsonl` is accessible, in two surviving steps.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from buffer.errors import AccountError
from buffer.ledger.account import FsckReport
from buffer.redis.server.check import check_all
from buffer.run import Run
from consumer.grpo.reporting.step_log import StepLog
from rolloutmq.command_list import command
from rolloutmq.options import AsJson, RedisUrl, RunDir, RunName, open_target
from rolloutmq.output import console, count, emit, plural
from rolloutmq.views.screen import groups_table

_SHOWN = 20


@command(
    "Administration", "fsck", epilog="Example: rolloutmq fsck --run-dir runs/demo && echo clean"
)
def fsck(
    redis_url: RedisUrl = None,
    run_dir: RunDir = None,
    run: RunName = None,
    as_json: AsJson = False,
) -> None:
    """Check that nothing is lost and nothing was trained twice.

    Checks every group in all indexes, on a live run. With the run's folder, it also checks what
    the trainer recorded. Exits with 6 if something is wrong: `rolloutmq run CONFIG --regenerate`
    then makes the run again from its newest checkpoint.
    """
    with open_target(redis_url, run_dir, run) as target:
        audit = run_audit(target.run, quiet=as_json)
        steps = read_steps(target.step_log)
        risks = could_lose(target.run)
    twice = steps.trained_twice() if steps else {}
    if as_json:
        emit(report(audit, steps) | {"could_lose": risks})
    else:
        show_audit(console(), audit, steps)
        for risk in risks:
            console().print(Text(f"[warn] {risk}", style="yellow"))
    if twice or not audit.clean:
        raise AccountError(
            f"{plural(len(audit.lost), 'group')} lost, {len(audit.doubled)} in two "
            f"places, {len(twice)} trained twice, "
            f"{len(audit.faults)} further faults",
            hint="`rolloutmq run CONFIG --regenerate` makes the run again from its newest "
            "checkpoint; please report this, with the output of --json",
        )


def run_audit(run: Run, *, quiet: bool = False) -> FsckReport:
    """Run `Account.fsck` with a progress bar on stderr."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    screen = console(stderr=True)
    with Progress(
        *columns, console=screen, transient=True, disable=quiet or not screen.is_terminal
    ) as progress:
        job = progress.add_task("checking every draw", total=None)
        return run.account.fsck(
            lambda done, total: progress.update(job, completed=done, total=total)
        )


def could_lose(run: Run) -> list[str]:
    """Return how the server could lose data with its settings."""
    findings = run.store.retrying("check", lambda: check_all(run.store.servers))
    return [f"{finding.what}: {finding.why}" for finding in findings if finding.level != "ok"]


def read_steps(path: Path | None) -> StepLog | None:
    if path is None:
        return None
    log = StepLog(path)
    log.read_new()
    return log


def report(audit: FsckReport, steps: StepLog | None) -> dict[str, Any]:
    twice = steps.trained_twice() if steps else {}
    return {
        "clean": audit.clean and not twice,
        "checked": audit.checked,
        "leases": audit.leases,
        "tasks": {
            task.task: {
                "enqueued": task.enqueued,
                "put": task.put,
                "imported": task.imported,
                "places": task.stages,
            }
            for task in audit.tasks
        },
        "faults": audit.faults,
        "lost": audit.lost,
        "doubled": audit.doubled,
        "damage": [found._asdict() for found in audit.damage],
        "trained_twice": twice,
        "trained_steps": len(steps.steps) if steps else None,
        "replayed_steps": steps.replaced if steps else None,
        "torn_lines": steps.torn if steps else None,
    }


def show_audit(screen: Console, audit: FsckReport, steps: StepLog | None) -> None:
    """Print the table of stages, then one line per check."""
    screen.print(groups_table(audit.tasks))
    screen.print()
    _verdict(screen, "all keys are as they must be, and the totals add up", audit.faults)
    _verdict(screen, f"0 of {count(audit.checked)} groups are lost", audit.lost, "lost")
    _verdict(screen, "no group is in two places or two batches", audit.doubled, "doubled")
    _verdict_on_steps(screen, steps)


def _verdict(screen: Console, good: str, bad: list[str], word: str = "wrong") -> None:
    if not bad:
        screen.print(Text.assemble(("[ok ] ", "green"), good))
        return
    screen.print(Text(f"[BAD] {len(bad)} {word}", style="bold red"))
    for line in bad[:_SHOWN]:
        screen.print(Text(f"      {line}", style="red"))
    if len(bad) > _SHOWN:
        screen.print(Text(f"      and {len(bad) - _SHOWN} more: see --json", style="red"))


def _verdict_on_steps(screen: Console, steps: StepLog | None) -> None:
    if steps is None:
        screen.print(
            Text(
                "[ - ] trained twice: there is no steps.jsonl (see --run-dir); only "
                "manifests were checked",
                style="dim",
            )
        )
        return
    groups = sum(len(step.gids) for step in steps.steps)
    good = f"no group was trained twice: {count(groups)} groups in {count(len(steps.steps))} steps"
    if steps.replaced:
        good += f"; {plural(steps.replaced, 'step')} replaced after a restart from a checkpoint"
    twice = [
        f"{gid} in steps {', '.join(map(str, where))}"
        for gid, where in steps.trained_twice().items()
    ]
    _verdict(screen, good, twice, "trained twice")
