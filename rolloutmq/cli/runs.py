"""`rolloutmq runs`: list the runs of a server and the run folders, or delete a run."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from buffer.errors import ConfigError, RoleHeld, RunNotFound, StoreUnavailable
from buffer.maintenance.remove_run import remove_run
from buffer.readable import format_size
from buffer.redis.keys import Keys
from buffer.redis.store import Store
from buffer.run import Run
from consumer.grpo.reporting.step_log import StepLog
from rolloutmq.command_list import command
from rolloutmq.options import RUNS, Address, AsJson, RedisUrl, RunDir, Yes, choose_run, open_server
from rolloutmq.output import age, answer, console, count, emit, plain, state, table
from rolloutmq.run_owner import known_folders, last_change, read_record
from rolloutmq.views.run_view import RunView, read_run_view

EPILOG = """
\b
Examples: rolloutmq runs
          rolloutmq runs --delete old-run --yes
"""

Delete = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Remove this run and all its data from the server."),
]


@dataclass(frozen=True, slots=True)
class RunLine:
    """One line of the list; `snap` is None while the run is being restored or removed."""

    name: str
    snap: RunView | None

    @property
    def seen_ms(self) -> int | None:
        """Return the age of the newest heartbeat of any process."""
        if self.snap is None:
            return None
        silences = [
            role.silent_ms
            for role in (self.snap.trainer, self.snap.producer)
            if role.silent_ms is not None
        ]
        silences += [worker.silent_ms for worker in self.snap.workers]
        return min(silences, default=None)

    @property
    def lives(self) -> list[str]:
        if self.snap is None:
            return []
        roles = {"the trainer": self.snap.trainer, "the producer": self.snap.producer}
        return [name for name, role in roles.items() if role.is_alive] + [
            worker.id for worker in self.snap.live_workers
        ]


@command("Look", "runs", epilog=EPILOG)
def runs(
    delete: Delete = None,
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
            _delete(store, choose_run(store, delete), yes, as_json)
        return
    is_named = redis_url is not None or run_dir is not None
    folders = [] if is_named else read_folders(RUNS)
    address, lines = _read_server(redis_url, run_dir, is_needed=not folders)
    if as_json:
        emit([_as_json(line) for line in lines] + [line.facts() for line in folders])
        return
    if lines:
        _print(lines)
    elif address:
        console().print(f"There is no run on {address}.")
    if folders:
        if address:
            console().print()
        console().print(folders_table(folders))


def _read_server(
    redis_url: str | None, run_dir: Path | None, *, is_needed: bool
) -> tuple[Address | None, list[RunLine]]:
    """Return a server and its runs; None if none runs and none was named. Raises StoreError."""
    try:
        with open_server(redis_url, run_dir) as (store, address):
            return address, [_line_of(store, name) for name in Run.names(store)]
    except StoreUnavailable:
        if is_needed or os.environ.get("REDIS_URL"):
            raise
        return None, []


def _line_of(store: Store, name: str) -> RunLine:
    try:
        return RunLine(name, read_run_view(Run.open(store, name)))
    except RunNotFound:
        return RunLine(name, None)


def _delete(store: Store, name: str, yes: bool, as_json: bool) -> None:
    line = _line_of(store, name)
    groups = sum(line.snap.stages.values()) if line.snap else 0
    if line.lives:
        raise RoleHeld(f"run {name!r} is in use: {', '.join(line.lives)}", hint="stop them first")
    if not yes:
        raise ConfigError(
            f"this would remove run {name!r} with {count(groups)} groups; nothing was changed",
            hint="`rolloutmq save` keeps a copy in a folder; pass --yes to remove the run",
        )
    view = store.at(Keys(name).meta)
    removed = remove_run(view, Keys(name, spread=view.in_cluster))
    answer(
        {"run": name, "keys": removed},
        f"run {name} removed: {count(removed)} keys",
        as_json=as_json,
    )


def _as_json(line: RunLine) -> dict[str, Any]:
    if line.snap is None:
        return {"run": line.name, "mode": "incomplete"}
    return {
        "run": line.name,
        "mode": line.snap.mode,
        "step": line.snap.taken,
        "groups": sum(line.snap.stages.values()),
        "payload_bytes": line.snap.memory.held,
        "created_ms": int(line.snap.meta.get("created_ms", 0)),
        "seen_ms_ago": line.seen_ms,
        "alive": line.lives,
    }


def _print(lines: list[RunLine]) -> None:
    grid = table(
        "run",
        "mode",
        "step",
        "groups",
        "size",
        "age",
        "last seen",
        right=["step", "groups", "size"],
    )
    for line in lines:
        if line.snap is None:
            grid.add_row(line.name, "incomplete: being restored or removed")
            continue
        made_ms = line.snap.now_ms - int(line.snap.meta.get("created_ms", 0))
        seen = (
            "now" if line.lives else "never" if line.seen_ms is None else f"{age(line.seen_ms)} ago"
        )
        held = format_size(line.snap.memory.held)
        groups = count(sum(line.snap.stages.values()))
        grid.add_row(
            line.name, state(line.snap.mode), str(line.snap.taken), groups, held, age(made_ms), seen
        )
    console().print(grid)


@dataclass(frozen=True, slots=True)
class FolderLine:
    """A run's folder; `stage` is that of its `rolloutmq run`, "" if it never had one."""

    folder: Path
    run: str
    stage: str
    step: int
    steps: int
    reward: float | None
    size: int
    changed_s: float
    detail: str

    def facts(self) -> dict[str, Any]:
        return {
            "run": self.run,
            "folder": str(self.folder),
            "stage": self.stage,
            "step": self.step,
            "steps": self.steps or None,
            "reward": self.reward,
            "bytes": self.size,
            "changed_s_ago": round(self.changed_s, 1),
            "detail": self.detail,
        }


def read_folders(root: Path) -> list[FolderLine]:
    """Return the run folders below `root`: running ones first, then by last use."""
    return [_folder_line(folder) for folder in known_folders(root)]


def _folder_line(folder: Path) -> FolderLine:
    record = read_record(folder)
    log = StepLog(folder / "steps.jsonl")
    log.read_new()
    newest = log.steps[-1] if log.steps else None
    return FolderLine(
        folder=folder,
        run=record.run if record else folder.name,
        stage=record.stage if record else "",
        step=newest.step if newest else 0,
        steps=record.steps if record else 0,
        reward=newest.metrics.get("rewards/mean") if newest else None,
        size=_size(folder),
        changed_s=max(0.0, time.time() - last_change(folder)),
        detail=record.detail if record else "",
    )


def _size(folder: Path) -> int:
    """Return the bytes of all files below a folder, without files that vanish meanwhile."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += Path(parent, name).lstat().st_size
            except FileNotFoundError:
                continue
    return total


def folders_table(lines: list[FolderLine]) -> Table:
    grid = table("folder", "state", "step", "reward", "size", "changed", "note",
                 right=["step", "reward", "size"])  # fmt: skip
    for line in lines:
        of = f" of {line.steps}" if line.steps else ""
        grid.add_row(
            plain(str(line.folder)),
            state(line.stage or "-"),
            f"{line.step}{of}",
            "-" if line.reward is None else f"{line.reward:.3f}",
            format_size(line.size),
            f"{age(1000 * line.changed_s)} ago",
            plain(line.detail),
        )
    return grid
