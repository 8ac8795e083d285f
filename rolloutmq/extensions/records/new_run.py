"""The folder of a run that a command makes from the records of another."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from buffer.config.run_settings import check_name
from buffer.errors import ConfigError
from buffer.redis.server.embedded import EmbeddedServer
from rolloutmq.hang_up import interrupted_by_sigterm
from rolloutmq.options import RUNS
from rolloutmq.run_owner import LOCK_FILE, Stage, choose_folder, own, read_record

JUDGE_FILE = "judge.json"
"""Of `rolloutmq rescore`: which judge has scored the archive in the folder."""


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
    folder with a whole run, or with anything else.
    """
    if rank:
        yield
        return
    left = [path for path in folder.glob("*") if path.name != LOCK_FILE]
    record = read_record(folder)
    is_ours = record is not None and record.command[:1] == [verb]
    is_done = record and record.stage is Stage.FINISHED and (folder / "checkpoints").exists()
    if left and (not is_ours or is_done):
        raise ConfigError(f"{folder} exists", hint="choose another --name, or delete the folder")
    with interrupted_by_sigterm(), own(folder, folder.name, [verb, *sys.argv[2:]], last) as owned:
        for path in left:
            if path.name in keep:
                continue
            if path.is_dir():
                EmbeddedServer(path).kill()  # one that outlived its owner
                shutil.rmtree(path)
            else:
                path.unlink()
        owned.note(Stage.RUNNING)
        yield
