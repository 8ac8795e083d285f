"""`rolloutmq dead`: the groups that nobody tries any more, and why."""

from __future__ import annotations

from dataclasses import asdict
from itertools import islice
from typing import Annotated

import typer
from rich.text import Text

from buffer.commands.screen import age, console, emit, plain, table
from buffer.commands.target import AsJson, RedisUrl, RunDir, RunName, open_target
from buffer.errors import ConfigError

EPILOG = "Example: rolloutmq dead --task math --limit 20"


def register(app: typer.Typer) -> None:
    app.command(epilog=EPILOG)(dead)


def dead(
    task: Annotated[str | None, typer.Option(help="Only groups of this task.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="At most so many.")] = 50,
    redis_url: RedisUrl = None,
    run_dir: RunDir = None,
    run: RunName = None,
    as_json: AsJson = False,
) -> None:
    """List dead letters, the newest first.

    A group dies when its tries are used up, or when a trainer cannot read it. It is kept, with the reason, until
    it is requeued or dropped.
    """
    with open_target(redis_url, run_dir, run) as target:
        known = target.run.limits.tasks
        if task is not None and task not in known:
            raise ConfigError(f"there is no task {task!r}", hint=f"one of {', '.join(known)}")
        fitting = (letter for letter in target.run.dead_letters.newest() if task in (None, letter.task))
        letters = list(islice(fitting, limit))
    if as_json:
        emit([asdict(letter) for letter in letters])
        return
    screen = console()
    if not letters:
        screen.print("No dead letter.")
        return
    grid = table("gid", "tries", "worker", "age", "reason", right=["tries", "age"])
    for letter in letters:
        where = "" if letter.step is None else f"in batch {letter.step}: "
        grid.add_row(
            letter.gid, str(letter.tries), plain(letter.worker), age(letter.age_ms), plain(where + letter.reason)
        )
    screen.print(grid)
    if len(letters) == limit:
        screen.print(Text(f"the newest {limit}; more with --limit", style="dim"))
