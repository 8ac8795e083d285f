"""`rolloutmq janitor` and `server`: maintain a run while its own processes are down."""

from __future__ import annotations

import logging
import re
import signal
import threading
from dataclasses import asdict
from typing import Annotated

import typer

from buffer.errors import ConfigError, StoreUnavailable
from buffer.janitor import Swept
from buffer.run import Run
from rolloutmq.console import console
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
        str | None, typer.Argument(metavar="RUN", help="Name of the run; the same as --run.")
    ] = None,
    once: Annotated[
        bool, typer.Option("--once", help="Exit once there is nothing left to do.")
    ] = False,
    every: Annotated[
        str, typer.Option(metavar="TIME", help="Time between two sweeps, such as 500ms, 1s or 2m.")
    ] = "1s",
    redis_url: RedisUrl = None,
    run_dir: RunDir = None,
    run: RunName = None,
    as_json: AsJson = False,
) -> None:
    """Revoke expired leases, expire old groups, free unused data.

    Workers and the producer do the same while they are alive; this is for the time when they are
    not, and it may run beside them. It continues after an outage of the server; SIGTERM stops it.
    It sweeps at least four times per lease: after a longer gap, which may have been an outage, no
    lease is revoked for a while.
    """
    every_s = seconds(every)
    stop = threading.Event()
    with open_target(redis_url, run_dir, name or run) as target:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stop.set())
        sweep_on(target.run, stop, every_s, once=once, as_json=as_json)


def sweep_on(run: Run, stop: threading.Event, every_s: float, *, once: bool, as_json: bool) -> None:
    """Sweep until `stop` is set or, with `once`, until nothing is left; print what was done."""
    round_s = min(every_s, run.limits.lease_ms / 4000)
    is_unreachable = False
    while not stop.is_set():
        try:
            swept = run.janitor.sweep()
        except StoreUnavailable as error:
            if once:
                raise
            if not is_unreachable:
                log.warning("nothing can be swept: %s", error)
            is_unreachable = True
            continue
        is_unreachable = False
        is_done = not (swept.has_more or swept.grace_ms)
        if done := describe(swept):
            emit_line(asdict(swept)) if as_json else console().print(done)
        if once and is_done:
            return
        if not swept.has_more:
            stop.wait(round_s)


def describe(swept: Swept) -> str:
    """Return in words what a sweep did; "" if there was nothing to do."""
    parts = (
        (swept.reaped, "group", "revoked from silent workers"),
        (swept.buried, "group", "dead after too many tries"),
        (swept.gone_workers, "worker", "removed"),
        (swept.expired, "group", "expired"),
        (swept.forgotten, "archived batch", "no longer retained"),
        (swept.freed, "payload", "freed"),
        (swept.media, "folder", "of ended groups deleted"),
    )
    return ", ".join(f"{plural(number, what)} {done}" for number, what, done in parts if number)


def seconds(text: str) -> float:
    """Convert `500ms`, `1s` or `2m` to seconds. Raises ConfigError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s|m)", text)
    if not found or not float(found[1]):
        raise ConfigError(
            f"{text!r} is not a time", hint="a number with its unit, such as 500ms, 1s or 2m"
        )
    return float(found[1]) * _UNITS_S[found[2]]


SERVER_EPILOG = (
    "Example: rolloutmq server --run-dir runs/demo && rolloutmq status --run-dir runs/demo"
)


def server(
    stop: Annotated[bool, typer.Option("--stop", help="Stop it; its data stays on disk.")] = False,
    run_dir: RunDir = None,
    as_json: AsJson = False,
) -> None:
    """Start or stop the embedded server of a run.

    `rolloutmq run` starts it by itself. This is for inspecting a run that has ended: the server
    runs until --stop, and the command prints how to reach it with redis-cli.
    """
    found = newest_server() if run_dir is None else (embedded_server(run_dir), run_dir)
    embedded, folder = found or (None, None)
    if embedded is None:
        where = "no folder under ./runs" if run_dir is None else str(run_dir)
        raise ConfigError(
            f"{where} has {'an' if run_dir is None else 'no'} embedded server",
            hint="pass --run-dir FOLDER; `rolloutmq run CONFIG` creates one",
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
