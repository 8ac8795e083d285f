"""`rolloutmq fence`: revoke what a worker holds."""

from __future__ import annotations

from typing import Annotated

import typer

from buffer.errors import ConfigError
from rolloutmq.console import console
from rolloutmq.options import AsJson, RedisUrl, RunDir, RunName, Yes, open_target
from rolloutmq.output import age, emit, plural

FENCE_EPILOG = "Example: rolloutmq fence host7-1 --yes"


def register(app: typer.Typer) -> None:
    app.command(epilog=FENCE_EPILOG)(fence)


def fence(
    worker: Annotated[
        str,
        typer.Argument(metavar="WORKER", help="Id of the worker; `rolloutmq workers` lists them."),
    ],
    yes: Yes = False,
    redis_url: RedisUrl = None,
    run_dir: RunDir = None,
    run: RunName = None,
    as_json: AsJson = False,
) -> None:
    """Revoke all groups that a worker holds, and remove the worker.

    Its groups are queued again; if it still submits them, they are refused. A worker that is alive
    notices at its next heartbeat, drops its groups, and registers again.
    """
    with open_target(redis_url, run_dir, run) as target:
        known = {row.id: row for row in target.run.fleet.workers()}
        if worker not in known:
            raise ConfigError(
                f"there is no worker {worker!r}",
                hint=f"known: {', '.join(sorted(known)) or 'none'}",
            )
        if not yes:
            held = plural(known[worker].holds, "group")
            seen = age(known[worker].silent_ms)
            raise ConfigError(
                f"this would revoke {held} of {worker}, last seen {seen} ago; nothing was changed",
                hint="pass --yes to do it",
            )
        revoked = target.run.fleet.fence(worker)
    if as_json:
        emit({"worker": worker, "revoked": revoked})
    else:
        console().print(f"{worker} is fenced; {plural(revoked, 'group')} revoked")
