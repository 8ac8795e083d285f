"""The folder of a run that a command makes from the records of another."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from buffer.errors import ConfigError
from rolloutmq.run_owner import LOCK_FILE, OwnedFolder, Stage, own, read_record

JUDGE_FILE = "judge.json"
"""Of `rolloutmq rescore`: which judge has scored the archive in the folder."""


@contextmanager
def new_run(
    folder: Path, verb: str, last: int, keep: Collection[str] = ()
) -> Iterator[OwnedFolder]:
    """Own `folder` for the command `verb`, which ends at step `last`.

    What a killed one left there is deleted, but for the names in `keep`. Raises ConfigError for a
    folder with a whole run, or with anything else.
    """
    left = [path for path in folder.glob("*") if path.name != LOCK_FILE]
    record = read_record(folder)
    is_ours = record is not None and record.command[:1] == [verb]
    is_done = record and record.stage is Stage.FINISHED and (folder / "checkpoints").exists()
    if left and (not is_ours or is_done):
        raise ConfigError(f"{folder} exists", hint="choose another --name, or delete the folder")
    with own(folder, folder.name, [verb, *sys.argv[2:]], last) as owned:
        for path in left:
            if path.name in keep:
                continue
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
        yield owned
