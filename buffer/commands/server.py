"""`rolloutmq server`: the embedded server of a run that has ended, for looking around, with its data as it was."""

from __future__ import annotations

from typing import Annotated

import typer

from buffer.commands.screen import console, emit, facts
from buffer.commands.target import AsJson, RunDir, embedded_server, newest_server
from buffer.errors import ConfigError

EPILOG = "Example: rolloutmq server --run-dir runs/demo && rolloutmq status --run-dir runs/demo"


def register(app: typer.Typer) -> None:
    app.command(epilog=EPILOG)(server)


def server(
    stop: Annotated[bool, typer.Option("--stop", help="Stop it in order; everything is on disk.")] = False,
    run_dir: RunDir = None,
    as_json: AsJson = False,
) -> None:
    """Start or stop the embedded server of a run.

    `rolloutmq run` starts it by itself. This is for looking around afterwards: it serves until --stop, and says how
    to reach it with redis-cli.
    """
    found = newest_server() if run_dir is None else (embedded_server(run_dir), run_dir)
    embedded, folder = found or (None, None)
    if embedded is None:
        where = "no run under ./runs" if run_dir is None else f"{run_dir} is no run that"
        raise ConfigError(
            f"{where} has an embedded server", hint="say --run-dir FOLDER; rolloutmq run CONFIG makes one"
        )
    embedded.stop() if stop else embedded.start()
    if as_json:
        emit({"run_dir": str(folder), "url": embedded.url, "running": embedded.is_running, "pid": embedded.pid})
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
