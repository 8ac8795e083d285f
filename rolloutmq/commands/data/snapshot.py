"""`rolloutmq save FOLDER` and `restore FOLDER`: copy a run to a folder, and back to a server."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress, TextColumn, TimeElapsedColumn

from buffer.control.control import Mode
from buffer.redis.replies import Advance
from buffer.run import Run
from buffer.snapshot.folder import read_manifest
from rolloutmq.console import console
from rolloutmq.options import AsJson, RedisUrl, RunDir, RunName, open_server, open_target
from rolloutmq.output import count, emit, plural

SAVE_EPILOG = "Example: rolloutmq save backups/demo-1200 --pause"


def register(app: typer.Typer) -> None:
    app.command(epilog=SAVE_EPILOG)(save)
    app.command(epilog=RESTORE_EPILOG)(restore)


def save(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="New folder for the snapshot.")],
    pause: Annotated[
        bool,
        typer.Option(
            "--pause", help="Freeze the workers during the copy. The saved run is paused, too."
        ),
    ] = False,
    redis_url: RedisUrl = None,
    run_dir: RunDir = None,
    run: RunName = None,
    as_json: AsJson = False,
) -> None:
    """Save a run to a folder: groups, order, counters, batches.

    The copy is of one instant, and nothing is stopped: if the run changes while its index is
    copied, it is copied again, up to a few times. Running groups are saved as waiting. Workers,
    events, weights and checkpoints are not saved.
    """
    start = time.monotonic()
    with (
        open_target(redis_url, run_dir, run) as target,
        _paused(target.run, pause),
        progress(as_json) as advance,
    ):
        facts = target.run.save(folder, advance=advance)
    took_s = time.monotonic() - start
    if as_json:
        emit(
            {"folder": str(folder), "took_s": round(took_s, 3)}
            | facts.model_dump(exclude={"meta", "files"})
        )
        return
    console().print(
        f"run {facts.run}: {plural(facts.groups, 'group')} and "
        f"{count(facts.payload_bytes + facts.media_bytes)} bytes "
        f"saved to {folder} in {took_s:.1f} s"
    )
    if facts.was_running:
        console().print(
            f"{plural(facts.was_running, 'running group')} saved as waiting, with the "
            "try given back"
        )


@contextmanager
def _paused(run: Run, wanted: bool) -> Iterator[None]:
    """Freeze the workers. A run that is paused already stays as it is, also afterwards."""
    if not wanted or run.control.state().mode is not Mode.RUN:
        yield
        return
    try:
        run.receipts.wait(run.control.set_mode("operator", Mode.KEEP))
        yield
    finally:
        run.control.set_mode("operator", Mode.RUN)


@contextmanager
def progress(quiet: bool) -> Iterator[Advance]:
    """Show on stderr what is being copied."""
    screen = console(stderr=True)
    columns = (TextColumn("{task.description}: {task.completed:,.0f}"), TimeElapsedColumn())
    with Progress(
        *columns, console=screen, transient=True, disable=quiet or not screen.is_terminal
    ) as bar:
        job = bar.add_task("copying", total=None)
        yield lambda what, done: bar.update(job, description=what, completed=done)


RESTORE_EPILOG = "Example: rolloutmq restore backups/demo-1200 --run demo2"


def restore(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of the snapshot.")],
    media: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="New folder for the run's files. Default: their former folder."
        ),
    ] = None,
    redis_url: RedisUrl = None,
    run_dir: RunDir = None,
    run: Annotated[
        str | None,
        typer.Option("--run", metavar="NAME", help="Name of the run. Default: its former name."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Restore a saved run to a server.

    The folder is checked first, and the run cannot be opened before it is complete. A run of that
    name must not be on the server. Workers, a producer and a trainer (with a checkpoint that is as
    old as the snapshot, or older) then join as usual. A run that was paused when it was saved is
    still paused.
    """
    start = time.monotonic()
    facts = read_manifest(folder)
    with open_server(redis_url, run_dir) as (store, _), progress(as_json) as advance:
        restored = Run.restore(store, folder, name=run, media=media, advance=advance)
        mode = restored.control.state().mode
    took_s = time.monotonic() - start
    if as_json:
        emit(
            {"run": restored.name, "groups": facts.groups, "mode": mode, "took_s": round(took_s, 3)}
        )
        return
    console().print(
        f"run {restored.name}: {plural(facts.groups, 'group')} restored in {took_s:.1f} s"
    )
    if mode is not Mode.RUN:
        console().print(
            f"it is paused ({mode}), as it was when it was saved; `rolloutmq resume` ends the pause"
        )
