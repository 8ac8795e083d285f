"""`rolloutmq drain`: nothing new is claimed, what runs is finished and handed in."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from buffer.commands.screen import age, console, emit, plural
from buffer.commands.target import AsJson, RedisUrl, RunDir, RunName, open_target
from buffer.control import Mode
from buffer.errors import PauseTimeout
from buffer.run import Run

EPILOG = """
\b
Example: rolloutmq drain && rolloutmq save backup && rolloutmq continue
"""

POLL_S = 0.2
"""Nobody rings when the last lease ends; a person waits."""

Timeout = Annotated[float, typer.Option(min=0, help="Seconds to wait for the last group.")]


def register(app: typer.Typer) -> None:
    app.command(epilog=EPILOG)(drain)


def drain(
    timeout: Timeout = 3600.0,
    redis_url: RedisUrl = None,
    run_dir: RunDir = None,
    run: RunName = None,
    as_json: AsJson = False,
) -> None:
    """Claim nothing more, finish what runs, and wait until nothing does.

    The run then stands still, with all results in its pools, until `rolloutmq continue`.
    """
    with open_target(redis_url, run_dir, run) as target:
        started = time.monotonic()
        target.run.control.set_mode("operator", Mode.DRAIN)
        left = _wait(target.run, started + timeout, quiet=as_json)
    took_s = time.monotonic() - started
    if left:
        raise PauseTimeout(
            f"{plural(left, 'group')} still run after {took_s:.0f} s; the run stays in drain mode",
            hint="`rolloutmq ls --stage running` lists them; `rolloutmq pause --mode abort` hands them back",
        )
    if as_json:
        emit({"run": target.run.name, "mode": "drain", "seconds": took_s})
    else:
        console().print(f"nothing runs any more, after {age(took_s * 1000)}; `rolloutmq continue` goes on")


def _wait(run: Run, end: float, *, quiet: bool) -> int:
    """Until nothing runs; how many groups are left."""
    said = -1
    while (left := run.account.totals().leases) and time.monotonic() < end:
        if left != said and not quiet:
            console().print(f"{plural(left, 'group')} to finish")
        said = left
        time.sleep(POLL_S)
    return left
