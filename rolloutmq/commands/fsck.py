"""`rolloutmq fsck`: proof that nothing was lost and nothing trained twice, on a live run.

Three proofs: the totals of one instant (I1); every draw by itself, looked at from every side at one
instant; and no group in two manifests nor, where the trainer's `steps.jsonl` is at hand, in two
steps of the surviving weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from buffer.batches.account import Account, Audit
from buffer.errors import AccountError
from buffer.monitoring.console import console
from buffer.monitoring.history import StepLog
from buffer.run import Run
from buffer.server.check import check_all
from rolloutmq.options import AsJson, RedisUrl, RunDir, RunName, open_target
from rolloutmq.output import count, emit, plural, table

EPILOG = "Example: rolloutmq fsck --run-dir runs/demo && echo nothing lost, nothing trained twice"

_SHOWN = 20


class WatchedAccount(Account):
    """An account that says how many draws it has looked at."""

    def __init__(self, run: Run, advance: Callable[[int], object]) -> None:
        super().__init__(run.store, run.keys, run.limits)
        self._advance = advance

    def places_of(self, gids: Sequence[str]) -> list[list[str]]:
        found = super().places_of(gids)
        self._advance(len(gids))
        return found


def register(app: typer.Typer) -> None:
    app.command(epilog=EPILOG)(fsck)


def fsck(
    redis_url: RedisUrl = None, run_dir: RunDir = None, run: RunName = None, as_json: AsJson = False
) -> None:
    """Prove: nothing was lost, nothing was trained twice.

    Looks at every group from every side, on a live run. With the run's folder at hand, also at what
    the trainer says it trained. Exit code 6 if something is wrong.
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
            f"{plural(len(audit.lost), 'group')} lost, {len(audit.doubled)} in two places, {len(twice)} trained twice, "
            f"{len(audit.faults)} sums that do not add up",
            hint="keep the server's data folder as it is and report this with the output of --json",
        )


def run_audit(run: Run, *, quiet: bool = False) -> Audit:
    """`Account.fsck` with a progress bar on stderr."""
    total = sum(task.drawn + task.outside for task in run.account.totals().tasks)
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
        job = progress.add_task("checking every draw", total=total)
        return WatchedAccount(run, lambda count: progress.advance(job, count)).fsck()


def could_lose(run: Run) -> list[str]:
    """What this server could still lose with its settings: what is proved here is only as safe as
    that.
    """
    findings = run.store.retrying("check", lambda: check_all(run.store.servers))
    return [f"{finding.what}: {finding.why}" for finding in findings if finding.level != "ok"]


def read_steps(path: Path | None) -> StepLog | None:
    """The trainer's own record, where one is known."""
    if path is None:
        return None
    log = StepLog(path)
    log.read_new()
    return log


def report(audit: Audit, steps: StepLog | None) -> dict[str, Any]:
    """The outcome as JSON."""
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
                "places": task.places,
            }
            for task in audit.tasks
        },
        "faults": audit.faults,
        "lost": audit.lost,
        "doubled": audit.doubled,
        "trained_twice": twice,
        "trained_steps": len(steps.steps) if steps else None,
        "replayed_steps": steps.replaced if steps else None,
        "torn_lines": steps.torn if steps else None,
    }


def show_audit(screen: Console, audit: Audit, steps: StepLog | None) -> None:
    """The outcome for people: the table of places, then one line per proof."""
    names = [task.task for task in audit.tasks]
    grid = table("place", *names, right=names)
    for place in audit.tasks[0].places if audit.tasks else ():
        values = [task.places[place] for task in audit.tasks]
        grid.add_row(place, *(count(value) for value in values), style="" if any(values) else "dim")
    grid.add_row("sum", *(count(sum(task.places.values())) for task in audit.tasks), style="bold")
    grid.add_row("enqueued", *(count(task.enqueued) for task in audit.tasks), style="bold")
    for how in ("put", "imported"):
        if any(values := [getattr(task, how) for task in audit.tasks]):
            grid.add_row(how, *map(count, values), style="bold")
    screen.print(grid)
    screen.print()
    _verdict(screen, "the sums of one instant add up", audit.faults)
    _verdict(screen, f"lost 0 of {count(audit.checked)} groups", audit.lost, "lost")
    _verdict(screen, "none in two places or two batches", audit.doubled, "doubled")
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
                "[ - ] trained twice: no steps.jsonl at hand (--run-dir); manifests were checked",
                style="dim",
            )
        )
        return
    groups = sum(len(step.gids) for step in steps.steps)
    good = f"trained twice 0: {count(groups)} groups in {count(len(steps.steps))} steps of the surviving weights"
    if steps.replaced:
        good += f"; {plural(steps.replaced, 'step')} trained again after a restart from an earlier checkpoint"
    twice = [
        f"{gid} in steps {', '.join(map(str, where))}"
        for gid, where in steps.trained_twice().items()
    ]
    _verdict(screen, good, twice, "trained twice")
