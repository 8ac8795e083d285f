"""`rolloutmq requeue GID`, `--all-dead`: let groups wait again, with all their tries."""

from __future__ import annotations

from typing import Annotated

import typer

from buffer.commands.group_place import describe_place
from buffer.commands.screen import console, emit, plural
from buffer.commands.target import AsJson, RedisUrl, RunDir, RunName, open_target
from buffer.errors import ConfigError
from buffer.run import Run

EPILOG = "Example: rolloutmq requeue math-0000000042 --yes"


def register(app: typer.Typer) -> None:
    app.command(epilog=EPILOG)(requeue)


def requeue(
    gid: Annotated[str | None, typer.Argument(metavar="[GID]", help="Id of a group: see rolloutmq dead.")] = None,
    all_dead: Annotated[bool, typer.Option("--all-dead", help="All dead letters.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do it, and not only say what would be done.")] = False,
    redis_url: RedisUrl = None,
    run_dir: RunDir = None,
    run: RunName = None,
    as_json: AsJson = False,
) -> None:
    """Let a dead group wait again, or one of a pool.

    It gets all its tries back and starts from its prompt: a result it had is thrown away. Only an aborted group
    keeps its tokens.
    """
    if (gid is None) is not all_dead:
        raise ConfigError("one thing to requeue is needed: a GID, or --all-dead")
    with open_target(redis_url, run_dir, run) as target:
        plan = _plan(target.run, gid)
        if not yes:
            raise ConfigError(f"{plan}; nothing was changed", hint="say --yes to do it")
        gids = [gid] if gid else [letter.gid for letter in target.run.dead_letters.newest()]
        moved = {one: target.run.jobs.requeue(one) for one in gids}
    if as_json:
        emit({"requeued": moved})
    elif gid is None:
        console().print(f"{plural(len(moved), 'dead group')} wait again")
    else:
        console().print(f"{gid} was {moved[gid]}; it waits")


def _plan(run: Run, gid: str | None) -> str:
    if gid is None:
        return f"this would let {plural(len(run.dead_letters), 'dead group')} wait again"
    return f"this would let {gid} wait again, which is {describe_place(run, gid)}"
