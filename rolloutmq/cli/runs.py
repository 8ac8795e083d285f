"""`rolloutmq runs` and `report`: list runs and their folders, delete a run, report one."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from rich.console import RenderableType
from rich.table import Table
from typer import Argument, Option

from buffer.errors import ConfigError, RoleHeld, RunNotFound, StoreUnavailable
from buffer.maintenance.remove_run import remove_run
from buffer.readable import format_size
from buffer.redis.keys import Keys
from buffer.redis.store import Store
from buffer.run.run import Run
from rolloutmq.command_list import command
from rolloutmq.options import (
    RUNS,
    Address,
    AsJson,
    Output,
    RedisUrl,
    RunDir,
    Yes,
    choose_run,
    newest_server,
    open_server,
)
from rolloutmq.output import age, console, count, known, state, table
from rolloutmq.run_owner import choose_folder, known_folders, last_change
from rolloutmq.views.explain.diagnosis import count_judges
from rolloutmq.views.run_folder import RunFolder
from rolloutmq.views.run_view import RunView, read_run_view
from rolloutmq.web.report import write_report

EPILOG = """
\b
Examples: rolloutmq runs
          rolloutmq runs --delete old-run --yes
"""


class RunLine(NamedTuple):
    """One line of the list; `view` is None while the run is being restored or removed."""

    name: str
    view: RunView | None

    @property
    def seen_ms(self) -> int | None:
        if self.view is None:
            return None
        silences = [each.silent_ms for each in (self.view.trainer, self.view.producer)]
        silences += [worker.silent_ms for worker in self.view.workers]
        return min((each for each in silences if each is not None), default=None)

    @property
    def lives(self) -> list[str]:
        if self.view is None:
            return []
        roles = [
            f"the {each.role}" for each in (self.view.trainer, self.view.producer) if each.is_alive
        ]
        return roles + [worker.id for worker in self.view.live_workers]

    def document(self) -> dict[str, Any]:
        if self.view is None:
            return {"run": self.name, "mode": "incomplete"}
        return {
            "run": self.name,
            "mode": self.view.mode,
            "step": self.view.taken,
            "groups": sum(self.view.stages.values()),
            "payload_bytes": self.view.memory.held,
            "created_ms": self.view.created_ms,
            "seen_ms_ago": self.seen_ms,
            "alive": self.lives,
        }


@command("runs", epilog=EPILOG)
def runs(
    delete: Annotated[
        str | None, Option(metavar="NAME", help="Remove this run and all its data from the server.")
    ] = None,
    yes: Yes = False,
    redis_url: RedisUrl = None,
    run_dir: RunDir = None,
    as_json: AsJson = False,
) -> None:
    """List the runs of a server and the run folders under ./runs, or delete a run of a server.

    Folders are left out where --redis-url or --run-dir names a server. A run with a process that is
    alive is not deleted. Its folder (weights, checkpoints, logs) is kept.
    """
    if delete is not None:
        with open_server(redis_url, run_dir) as (store, _):
            name = choose_run(store, delete)
            line = _line_of(store, name)
            _, judges = count_judges(store, Keys(name))
            if lives := [*line.lives, *(["judge"] if judges else [])]:
                used = f"run {name!r} is in use: {', '.join(lives)}"
                raise RoleHeld(used, hint="stop them first")
            if not yes:
                groups = count(sum(line.view.stages.values()) if line.view else 0)
                raise ConfigError(
                    f"this would remove run {name!r} with {groups} groups; nothing was changed",
                    hint="`rolloutmq save` keeps a copy in a folder; pass --yes to remove the run",
                )
            view = store.at(Keys(name).meta)
            with suppress(RunNotFound):  # an interrupted removal has deleted the files already
                Run.open(view, name).columns.remove()
            removed = remove_run(view, Keys(name))
            said = f"run {name} removed: {count(removed)} keys"
            Output({"run": name, "keys": removed}, said).print(as_json=as_json)
        return
    is_named = redis_url is not None or run_dir is not None
    folders = [] if is_named else [_folder_line(folder) for folder in known_folders(RUNS)]
    address, lines = _read_server(redis_url, run_dir, is_needed=is_named)
    shown: list[RenderableType] = []
    if address:
        shown.append(_runs_table(lines) if lines else f"There is no run on {address}.")
    if folders:
        shown += [*([""] if address else []), _folders_table(folders)]
    if not shown:
        shown.append(f"There is no run below {RUNS.resolve()}. To start one: rolloutmq run demo")
    document = [line.document() for line in lines]
    document += [line._asdict() | {"folder": str(line.folder)} for line in folders]
    Output(document, shown).print(as_json=as_json)


def _read_server(
    redis_url: str | None, run_dir: Path | None, *, is_needed: bool
) -> tuple[Address | None, list[RunLine]]:
    """Return a server and its runs; None if none runs and none was named. Raises StoreError."""
    is_needed |= bool(os.environ.get("REDIS_URL"))
    newest = newest_server()
    if not (is_needed or (newest and newest[0].is_running)):
        return None, []
    try:
        with open_server(redis_url, run_dir) as (store, address):
            return address, [_line_of(store, name) for name in Run.names(store)]
    except StoreUnavailable:
        if is_needed:
            raise
        return None, []


def _line_of(store: Store, name: str) -> RunLine:
    try:
        return RunLine(name, read_run_view(Run.open(store, name)))
    except RunNotFound:
        return RunLine(name, None)


def _runs_table(lines: list[RunLine]) -> Table:
    grid = table("run", "state", "step", "groups", "size", "age", "last seen",
                 right=["step", "groups", "size"])  # fmt: skip
    for line in lines:
        if line.view is None:
            grid.add_row(line.name, "incomplete: being restored or removed")
            continue
        seen = "never" if line.seen_ms is None else f"{age(line.seen_ms)} ago"
        grid.add_row(
            line.name,
            state(line.view.phase),
            str(line.view.taken),
            count(sum(line.view.stages.values())),
            format_size(line.view.memory.held),
            age(line.view.now_ms - line.view.created_ms),
            "now" if line.lives else seen,
        )
    return grid


class FolderLine(NamedTuple):
    """A run's folder; `stage` is that of its `rolloutmq run`, "" if it never had one."""

    run: str
    folder: Path
    stage: str
    step: int
    steps: int | None
    reward: float | None
    bytes: int
    changed_s_ago: float
    detail: str


def _folder_line(folder: Path) -> FolderLine:
    read = RunFolder(folder)
    record = read.record
    return FolderLine(
        run=read.name,
        folder=folder,
        stage=record.stage if record else "",
        step=read.step,
        steps=record.steps if record else None,
        reward=read.reward,
        bytes=_size(folder),
        changed_s_ago=round(max(0.0, time.time() - last_change(folder)), 1),
        detail=record.detail if record else "",
    )


def _size(folder: Path) -> int:
    """Return the bytes of all files below a folder, without files that vanish meanwhile."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                total += Path(parent, name).lstat().st_size
    return total


def _folders_table(lines: list[FolderLine]) -> Table:
    grid = table("folder", "state", "step", "reward", "size", "changed", "note",
                 right=["step", "reward", "size"])  # fmt: skip
    for line in lines:
        of = f" of {line.steps}" if line.steps else ""
        grid.add_row(
            str(line.folder),
            state(line.stage or "-"),
            f"{line.step}{of}",
            known(line.reward, ".3f"),
            format_size(line.bytes),
            f"{age(1000 * line.changed_s_ago)} ago",
            line.detail,
        )
    return grid


REPORT_EPILOG = """
\b
Examples: rolloutmq report
          rolloutmq report runs/demo -o demo.html
"""


@command("report", epilog=REPORT_EPILOG)
def report(
    folder: Annotated[
        Path | None,
        Argument(
            metavar="RUN_FOLDER",
            help="Folder of the run. Default: the one under ./runs that runs, or was used last.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        Option("--output", "-o", metavar="FILE", help="Default: report.html in the run's folder."),
    ] = None,
) -> None:
    """Write a run's folder as one HTML file, to send or to keep.

    It has curves, evaluations, samples, settings, versions and the account, and needs neither a
    server nor a network. Texts of rollouts are in it.
    """
    run_folder = choose_folder(folder, RUNS)
    file = output or run_folder / "report.html"
    size = write_report(run_folder, file)
    if not size:
        raise ConfigError(
            f"{run_folder} has no train step and no evaluation",
            hint="`rolloutmq runs` lists the run folders and their steps",
        )
    console().print(f"{file}: {size / 1e6:.1f} MB", soft_wrap=True)
