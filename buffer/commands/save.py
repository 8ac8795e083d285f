"""`rolloutmq save FOLDER`: all of a run in a folder, as of one instant, while it may go on."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress, TextColumn, TimeElapsedColumn

from buffer.commands.screen import console, count, emit, plural
from buffer.commands.target import AsJson, RedisUrl, RunDir, RunName, open_target
from buffer.control import Mode
from buffer.run import Run
from buffer.snapshot.cut import Advance

EPILOG = "Example: rolloutmq save backups/demo-1200 --pause"


def register(app: typer.Typer) -> None:
    app.command(epilog=EPILOG)(save)


def save(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="New folder of the snapshot.")],
    pause: Annotated[
        bool, typer.Option("--pause", help="Pause workers (keep) meanwhile. The saved run is paused, too.")
    ] = False,
    redis_url: RedisUrl = None,
    run_dir: RunDir = None,
    run: RunName = None,
    as_json: AsJson = False,
) -> None:
    """Save a run to a folder: groups, order, counters, batches.

    Of one instant, without stopping anything: if the run moves while its index is copied, it is copied again, and
    the command gives up after a few times. Running groups are saved as waiting. Workers, events, weights and
    checkpoints are not in it.
    """
    start = time.monotonic()
    with open_target(redis_url, run_dir, run) as target, _paused(target.run, pause), progress(as_json) as advance:
        facts = target.run.save(folder, advance=advance)
    took_s = time.monotonic() - start
    if as_json:
        emit({"folder": str(folder), "took_s": round(took_s, 3)} | facts.model_dump(exclude={"meta", "files"}))
        return
    console().print(
        f"run {facts.run}: {plural(facts.groups, 'group')} and {count(facts.payload_bytes + facts.media_bytes)} bytes "
        f"saved to {folder} in {took_s:.1f} s"
    )
    if facts.was_running:
        console().print(f"{plural(facts.was_running, 'running group')} saved as waiting, with the try given back")


@contextmanager
def _paused(run: Run, wanted: bool) -> Iterator[None]:
    """Workers freeze, unless somebody paused the run already: then that pause is neither changed nor ended."""
    if not wanted or run.control.state().mode is not Mode.RUN:
        yield
        return
    try:
        run.control.wait_for_receipts(run.control.set_mode("operator", Mode.KEEP))
        yield
    finally:
        run.control.set_mode("operator", Mode.RUN)


@contextmanager
def progress(quiet: bool) -> Iterator[Advance]:
    """A line on stderr that says what is being done."""
    screen = console(stderr=True)
    columns = (TextColumn("{task.description}: {task.completed:,.0f}"), TimeElapsedColumn())
    with Progress(*columns, console=screen, transient=True, disable=quiet or not screen.is_terminal) as bar:
        job = bar.add_task("copying", total=None)
        yield lambda what, done: bar.update(job, description=what, completed=done)
