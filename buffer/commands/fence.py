"""`rolloutmq fence WORKER`: revoke all that a worker holds, so that others generate it."""

from __future__ import annotations

from typing import Annotated

import typer

from buffer.commands.screen import age, console, emit, plural
from buffer.commands.target import AsJson, RedisUrl, RunDir, RunName, open_target
from buffer.errors import ConfigError

EPILOG = "Example: rolloutmq fence host7-1 --yes"


def register(app: typer.Typer) -> None:
    app.command(epilog=EPILOG)(fence)


def fence(
    worker: Annotated[str, typer.Argument(metavar="WORKER", help="Id of the worker: see rolloutmq workers.")],
    yes: Annotated[bool, typer.Option("--yes", help="Do it, and not only say what would be done.")] = False,
    redis_url: RedisUrl = None,
    run_dir: RunDir = None,
    run: RunName = None,
    as_json: AsJson = False,
) -> None:
    """Revoke all that a worker holds, and forget it.

    Its groups wait again; what it still submits of them is refused. A worker that lives notices at its next
    heartbeat, drops its work, and joins again.
    """
    with open_target(redis_url, run_dir, run) as target:
        known = {row.id: row for row in target.run.fleet.workers()}
        if worker not in known:
            raise ConfigError(f"there is no worker {worker!r}", hint=f"known: {', '.join(sorted(known)) or 'none'}")
        if not yes:
            held, seen = plural(known[worker].holds, "group"), age(known[worker].silent_ms)
            raise ConfigError(
                f"this would revoke {held} of {worker}, last seen {seen} ago; nothing was changed",
                hint="say --yes to do it",
            )
        revoked = target.run.fleet.fence(worker)
    if as_json:
        emit({"worker": worker, "revoked": revoked})
    else:
        console().print(f"{worker} is fenced; {plural(revoked, 'group')} taken from it")
