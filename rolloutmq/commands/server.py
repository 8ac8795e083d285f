"""`rolloutmq janitor`: sweeps a run as a process of its own, whoever else is dead.

`rolloutmq server`: the embedded server of a run that has ended, for looking around, with its data
as it was.
"""

from __future__ import annotations

import logging
import re
import signal
import threading
from dataclasses import asdict
from typing import Annotated

import typer

from buffer.errors import ConfigError, StoreUnavailable
from buffer.maintenance.janitor import Swept
from buffer.monitoring.console import console
from buffer.run import Run
from rolloutmq.options import (
    AsJson,
    RedisUrl,
    RunDir,
    RunName,
    embedded_server,
    newest_server,
    open_target,
)
from rolloutmq.output import emit, emit_line, facts, plural

log = logging.getLogger("rolloutmq.janitor")

JANITOR_EPILOG = "Example: rolloutmq janitor demo --every 500ms --json"

_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0}


def register(app: typer.Typer) -> None:
    app.command(epilog=JANITOR_EPILOG)(janitor)
    app.command(epilog=SERVER_EPILOG)(server)


def janitor(
    name: Annotated[
        str | None, typer.Argument(metavar="RUN", help="Name of the run, as with --run.")
    ] = None,
    once: Annotated[
        bool, typer.Option("--once", help="Leave once there is nothing left to do.")
    ] = False,
    every: Annotated[
        str, typer.Option(metavar="TIME", help="Time between two sweeps, as 500ms, 1s or 2m.")
    ] = "1s",
    redis_url: RedisUrl = None,
    run_dir: RunDir = None,
    run: RunName = None,
    as_json: AsJson = False,
) -> None:
    """Take back leases, expire old groups, free what nobody needs.

    Workers and the producer do the same while they live; this is for when they do not, and beside
    them it does no harm. Goes on when the server was away; SIGTERM stops it. It sweeps at least
    four times per lease: after a longer silence all leases are spared for a while, since it may
    have been an outage.
    """
    every_s = seconds(every)
    stop = threading.Event()
    with open_target(redis_url, run_dir, name or run) as target:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stop.set())
        sweep_on(target.run, stop, every_s, once=once, as_json=as_json)


def sweep_on(run: Run, stop: threading.Event, every_s: float, *, once: bool, as_json: bool) -> None:
    """Sweep until `stop` is set; with `once`, until nothing is left to do. Prints what was done."""
    round_s = min(every_s, run.limits.lease_ms / 4000)
    is_away = False
    while not stop.is_set():
        try:
            swept = run.janitor.sweep()
        except StoreUnavailable as error:
            if once:
                raise
            if not is_away:
                log.warning("nothing is swept: %s", error)
            is_away = True
            continue
        is_away = False
        is_done = not (swept.has_more or swept.grace_ms)
        if done := describe(swept):
            emit_line(asdict(swept)) if as_json else console().print(done)
        if once and is_done:
            return
        if not swept.has_more:
            stop.wait(round_s)


def describe(swept: Swept) -> str:
    """What a sweep did, in words; empty if it found nothing to do."""
    parts = (
        (swept.reaped, "group", "taken back from silent workers"),
        (swept.buried, "group", "dead after too many tries"),
        (swept.gone_workers, "worker", "forgotten"),
        (swept.expired, "group", "too old"),
        (swept.forgotten, "archived batch", "no longer retained"),
        (swept.freed, "payload", "freed"),
        (swept.media, "folder", "of ended groups deleted"),
    )
    return ", ".join(f"{plural(number, what)} {done}" for number, what, done in parts if number)


def seconds(text: str) -> float:
    """`500ms`, `1s` or `2m` in seconds; ConfigError says what would be right."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s|m)", text)
    if not found or not float(found[1]):
        raise ConfigError(f"{text!r} is no time", hint="a number and its unit, as 500ms, 1s or 2m")
    return float(found[1]) * _UNITS_S[found[2]]


SERVER_EPILOG = (
    "Example: rolloutmq server --run-dir runs/demo && rolloutmq status --run-dir runs/demo"
)


def server(
    stop: Annotated[
        bool, typer.Option("--stop", help="Stop it in order; everything is on disk.")
    ] = False,
    run_dir: RunDir = None,
    as_json: AsJson = False,
) -> None:
    """Start or stop the embedded server of a run.

    `rolloutmq run` starts it by itself. This is for looking around afterwards: it serves until
    --stop, and says how to reach it with redis-cli.
    """
    found = newest_server() if run_dir is None else (embedded_server(run_dir), run_dir)
    embedded, folder = found or (None, None)
    if embedded is None:
        where = "no run under ./runs" if run_dir is None else f"{run_dir} is no run that"
        raise ConfigError(
            f"{where} has an embedded server",
            hint="say --run-dir FOLDER; rolloutmq run CONFIG makes one",
        )
    embedded.stop() if stop else embedded.start()
    if as_json:
        emit(
            {
                "run_dir": str(folder),
                "url": embedded.url,
                "running": embedded.is_running,
                "pid": embedded.pid,
            }
        )
    elif stop:
        console().print(f"the server of {folder} is stopped; its data is on disk")
    else:
        rows = [
            ("server of", str(folder)),
            ("url", embedded.url),
            ("redis-cli", embedded.cli),
            ("pid", str(embedded.pid)),
        ]
        console().print(facts([(name, value) for name, value in rows]))
