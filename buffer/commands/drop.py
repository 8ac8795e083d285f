"""`rolloutmq drop GID`: end a group by hand."""

from __future__ import annotations

from typing import Annotated

import typer

from buffer.commands.group_place import describe_place
from buffer.commands.screen import console, emit
from buffer.commands.target import AsJson, RedisUrl, RunDir, RunName, open_target
from buffer.errors import ConfigError

EPILOG = "Example: rolloutmq drop math-0000000042 --yes"


def register(app: typer.Typer) -> None:
    app.command(epilog=EPILOG)(drop)


def drop(
    gid: Annotated[str, typer.Argument(metavar="GID", help="Id of a group, for example math-0000000042.")],
    revoke: Annotated[
        str, typer.Option(metavar="WORKER", help="The worker that runs it: its lease ends in the same step.")
    ] = "",
    yes: Annotated[bool, typer.Option("--yes", help="Do it, and not only say what would be done.")] = False,
    redis_url: RedisUrl = None,
    run_dir: RunDir = None,
    run: RunName = None,
    as_json: AsJson = False,
) -> None:
    """End a group that waits, is in a pool, or is dead.

    It is counted as dropped, its bytes are freed, and its prompt is not drawn again. A group that runs is refused
    unless its worker is named; one in a batch always is.
    """
    with open_target(redis_url, run_dir, run) as target:
        where = describe_place(target.run, gid)
        if not yes:
            raise ConfigError(f"this would end {gid}, which is {where}; nothing was changed", hint="say --yes to do it")
        before = target.run.jobs.drop(gid, revoke=revoke)
    if as_json:
        emit({"gid": gid, "before": before})
    elif before == "dropped":
        console().print(f"{gid} was dropped before; nothing was to do")
    else:
        console().print(f"{gid} was {before}; it is dropped")
