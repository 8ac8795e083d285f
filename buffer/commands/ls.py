"""`rolloutmq ls`: the groups of a run that still live, by task, status and stage."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer
from rich.text import Text

from buffer.commands.group_index import STAGES, find_groups
from buffer.commands.screen import console, count, emit, state, table, version_style
from buffer.commands.target import AsJson, RedisUrl, RunDir, RunName, open_target
from buffer.errors import ConfigError
from buffer.keys import POOLS

EPILOG = "Example: rolloutmq ls --task math --status completed --limit 20"

_STATUSES = ("init", *POOLS, "failed")


def register(app: typer.Typer) -> None:
    app.command(name="ls", epilog=EPILOG)(list_groups)


def list_groups(
    task: Annotated[str | None, typer.Option(help="Only groups of this task.")] = None,
    status: Annotated[str | None, typer.Option(help=f"Only this status: {', '.join(_STATUSES)}.")] = None,
    stage: Annotated[str | None, typer.Option(help=f"Only this stage: {', '.join(STAGES)}.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="At most so many.")] = 50,
    redis_url: RedisUrl = None,
    run_dir: RunDir = None,
    run: RunName = None,
    as_json: AsJson = False,
) -> None:
    """List groups, in the order in which they will be served.

    Finds them through the run's indexes. Archived, filtered and dropped groups have ended and are only counted.
    """
    _check("status", status, _STATUSES)
    _check("stage", stage, STAGES)
    with open_target(redis_url, run_dir, run) as target:
        _check("task", task, tuple(target.run.limits.tasks))
        rows = find_groups(target.run, task=task, status=status, stage=stage, limit=limit)
    if as_json:
        emit([asdict(row) for row in rows])
        return
    screen = console()
    if not rows:
        screen.print("No such group. (Archived, filtered and dropped ones have ended: see rolloutmq status.)")
        return
    grid = table("gid", "stage", "status", "ver", "stale", "tries", "tokens", "reward", "owner",
                 right=["ver", "stale", "tries", "tokens", "reward"])  # fmt: skip
    for row in rows:
        style = "dim" if row.version is None else version_style(row.version)
        grid.add_row(
            row.gid,
            state(row.stage, width=7),
            row.status,
            Text("-" if row.version is None else str(row.version), style=style),
            "-" if row.staleness is None else str(row.staleness),
            str(row.tries),
            count(row.tokens),
            "-" if row.reward is None else f"{row.reward:.2f}",
            row.owner or row.batch,
        )
    screen.print(grid)
    if len(rows) == limit:
        screen.print(Text(f"the first {limit}; more with --limit", style="dim"))


def _check(option: str, value: str | None, known: tuple[str, ...]) -> None:
    if value is not None and value not in known:
        raise ConfigError(f"there is no {option} {value!r}", hint=f"one of {', '.join(known)}")
