"""The two folders of a command on records: of the run that it reads, and of the one it makes."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated

import orjson
from typer import Argument

from buffer.config.run_settings import check_name
from buffer.errors import ConfigError, RolloutMQError
from buffer.redis.server.embedded import EmbeddedServer
from consumer.handle.checkpoint import CheckpointFolder
from rolloutmq.hang_up import interrupted_by_sigterm
from rolloutmq.options import RUNS
from rolloutmq.run_owner import LOCK_FILE, Stage, choose_folder, own, read_record

UNPACKED = "rolloutmq-bundle-"
"""Begins the name of a temporary folder with a bundle, and with the run that is made of it."""

ParentFolder = Annotated[
    Path | None,
    Argument(
        metavar="RUN_FOLDER",
        help="Folder of the run. Default: the one under ./runs that runs, or was used last.",
    ),
]


def choose_parent(folder: Path | None) -> Path:
    """Return the folder of the run whose records are read, with a name of its own: not `.`."""
    found = choose_folder(folder, RUNS)
    return found.resolve() if found.name in ("", "..") else found


def beside(parent: Path, name: str) -> Path:
    """Return the folder of a new run `name` beside `parent`. Raises ConfigError."""
    try:
        folder = parent.with_name(check_name(name))
    except ValueError as error:
        raise ConfigError(f"--name {name!r}: {error}", hint="choose another --name") from error
    if folder == parent:
        raise ConfigError(f"{folder} is the run itself", hint="choose another --name")
    return folder


@contextmanager
def new_run(
    folder: Path, verb: str, last: int, keep: Collection[str] = (), *, rank: int = 0
) -> Iterator[None]:
    """Own `folder` for the command `verb`, which ends at step `last`; ranks but 0 own nothing.

    What a killed one left there is deleted, but for the names in `keep`. Raises ConfigError for a
    folder with a whole run, or with anything else. A mistake in the command leaves no folder.
    """
    if rank:
        yield
        return

    def left() -> list[Path]:
        return [path for path in folder.glob("*") if path.name != LOCK_FILE]

    def check() -> None:
        record = read_record(folder)
        is_ours = record is not None and record.command[:1] == [verb]
        is_done = record and record.stage is Stage.FINISHED and (folder / "checkpoints").exists()
        if left() and (not is_ours or is_done):
            hint = "choose another --name, or delete the folder"
            raise ConfigError(f"{folder} exists", hint=hint)

    check()
    command = [verb, *sys.argv[2:]]
    with interrupted_by_sigterm(), own(folder, folder.name, command, last, check) as owned:
        owned.check()  # a command that failed may have deleted the folder before the lock was free
        for path in left():
            if path.name not in keep:
                _delete(path)
        owned.note(Stage.RUNNING)
        try:
            yield
        except RolloutMQError:
            if not left():
                shutil.rmtree(folder)
            raise


@contextmanager
def unpacked() -> Iterator[Path]:
    """Yield a temporary folder, after deleting those of killed replays of bundles."""
    for run in Path(tempfile.gettempdir()).glob(f"{UNPACKED}*/*"):
        with suppress(FileNotFoundError):  # another process deletes it
            record = read_record(run) if run.stat().st_uid == os.getuid() else None
            if record and record.stage is Stage.DIED:
                for path in run.iterdir():
                    _delete(path)
                shutil.rmtree(run.parent)
    with tempfile.TemporaryDirectory(prefix=UNPACKED) as folder:
        yield Path(folder)


def _delete(path: Path) -> None:
    if path.is_dir():
        EmbeddedServer(path).kill()  # one that outlived its owner
        shutil.rmtree(path)
    else:
        path.unlink()


def checkpoint_of(run: Path, step: int) -> Path:
    """Return the folder of a checkpoint that a run keeps. Raises ConfigError."""
    kept = CheckpointFolder(run / "checkpoints")
    if step in kept.steps():
        return kept.path(step)
    raise ConfigError(
        f"{run} has no checkpoint of step {step}",
        hint=f"kept: {', '.join(map(str, kept.steps())) or 'none'}; `rolloutmq replay {run} --to "
        f"{step}` makes one in another folder: name that (for a bundle with --archive of this run)",
    )


def link_file(source: str | Path, target: str | Path) -> None:
    """Give a file that never changes another name; copy it to another file system."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def link_checkpoint(source: Path, target: Path, *without: str) -> None:
    """Link the files of a checkpoint, but for these names. Raises ConfigError if it goes away."""
    try:
        ignore = shutil.ignore_patterns(*without)
        shutil.copytree(source, target, ignore=ignore, copy_function=link_file, dirs_exist_ok=True)
        source.stat()  # a trainer renames it, then deletes it
    except OSError as error:
        if source.exists():
            raise
        raise ConfigError(
            f"the run deleted {source} meanwhile",
            hint="take a newer checkpoint, or keep more of them: trainer.keep_checkpoints",
        ) from error


def log_lines(file: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the step and the bytes of each line of a log that no kill has torn."""
    for line in file.read_bytes().splitlines(keepends=True) if file.exists() else []:
        with suppress(ValueError):
            yield orjson.loads(line)["step"], line
