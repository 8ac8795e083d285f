"""`rolloutmq resume FOLDER`: a saved run on a server that has none of its name."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from buffer.commands.save import progress
from buffer.commands.screen import console, emit, plural
from buffer.commands.target import AsJson, RedisUrl, RunDir, open_server
from buffer.control import Mode
from buffer.run import Run
from buffer.snapshot.folder import read_manifest

EPILOG = "Example: rolloutmq resume backups/demo-1200 --run demo2"


def register(app: typer.Typer) -> None:
    app.command(epilog=EPILOG)(resume)


def resume(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of the snapshot.")],
    media: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="New folder for the run's files. Default: where they were.")
    ] = None,
    redis_url: RedisUrl = None,
    run_dir: RunDir = None,
    run: Annotated[
        str | None, typer.Option("--run", metavar="NAME", help="Name for the run. Default: the one it had.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Bring a saved run back to a server.

    All of it or nothing: the folder is checked first, and nobody can open the run before it is whole. A run of that
    name must not be on the server. Workers, a producer and a trainer (with a checkpoint that is as old as the
    snapshot, or older) then join as ever; a run that was paused when it was saved is still paused.
    """
    start = time.monotonic()
    facts = read_manifest(folder)
    with open_server(redis_url, run_dir) as (store, _), progress(as_json) as advance:
        resumed = Run.resume(store, folder, name=run, media=media, advance=advance)
        mode = resumed.control.state().mode
    took_s = time.monotonic() - start
    if as_json:
        emit({"run": resumed.name, "groups": facts.groups, "mode": mode, "took_s": round(took_s, 3)})
        return
    console().print(f"run {resumed.name}: {plural(facts.groups, 'group')} resumed in {took_s:.1f} s")
    if mode is not Mode.RUN:
        console().print(f"it is paused ({mode}), as it was when it was saved: see rolloutmq continue")
