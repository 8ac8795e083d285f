"""Checkpoints: the trainer's position, its weights and its optimizer, in one folder (I6).

<folder>/step-000012/trainer.json           the position (buffer/ledger/position.py)
                     state-*.safetensors     of each rank (saved_state.py)
                     *.sha256                the digest of each, for `sha256sum -c`

Invariant: a folder under its final name is complete.
"""

from __future__ import annotations

import hashlib
import logging
import re
import shutil
import uuid
from pathlib import Path
from typing import Any

import orjson

from buffer.errors import ModelError, RolloutMQError
from buffer.ledger.position import Position
from buffer.redis.whole_file import sync
from buffer.weights.new_folder import follow_umask
from buffer.weights.transport import Save

log = logging.getLogger("rolloutmq.trainer")

POSITION = "trainer.json"

DIGEST = ".sha256"  # suffix of the file with the digest of another

ROWS = "rows"  # metadata key: first row and number of all rows of sharded tensors


class CheckpointFolder:
    """All checkpoints of a run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:06d}"

    def steps(self) -> list[int]:
        """Return the steps of complete checkpoints, oldest first."""
        return [step for step in self._folders() if (self.path(step) / POSITION).exists()]

    def read(self, step: int) -> Position:
        """Return the position of a checkpoint. Raises ModelError where its file is unusable."""
        file = self.path(step) / POSITION
        try:
            position = Position.model_validate_json(file.read_bytes())
            if position.step != step:
                raise ValueError(f"it holds the position of step {position.step}")
        except (OSError, ValueError) as error:
            reason = " ".join(str(error).split())  # on one line
            raise ModelError(
                f"{file} is not a checkpoint: {reason}",
                hint="remove its folder to use an older checkpoint",
            ) from error
        return position

    def newest_whole(self, *, has_state: bool = True) -> Position | None:
        """Return the newest whole position; None: no checkpoint.

        `has_state`: the reference trainer wrote them, whose files of tensors are checked, too.
        Raises ModelError if none is whole.
        """
        problems = []
        for step in reversed(self._folders()):
            try:
                if has_state:
                    check_state(self.path(step))
                return self.read(step)
            except ModelError as error:
                log.warning("passing over the checkpoint of step %s: %s", step, error.message)
                problems.append(error.message)
        if problems:
            raise ModelError(
                f"no checkpoint in {self.folder} is whole: {'; '.join(problems)}",
                hint="put a copy of one of them back; or move the folder away and start with "
                "--regenerate, which trains from step 1 again",
            )
        return None

    def write(self, position: Position, save: Save) -> Path:
        """Write a checkpoint and return its folder; `save` writes all parts but the position."""
        folder = self.begin(position.step)
        try:
            save(folder)
            return self.complete(position, folder)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise

    def begin(self, step: int) -> Path:
        """Create a hidden folder for all parts of a checkpoint but the position."""
        folder = self._hidden(self.path(step))
        self.folder.mkdir(exist_ok=True)  # but not that of a run which was deleted
        folder.mkdir()
        return folder

    def complete(self, position: Position, folder: Path) -> Path:
        """Make the checkpoint in a folder of `begin` durable and visible; return its new path.

        Replaces one of the same step. Raises RolloutMQError where the disk is full.
        """
        path = self.path(position.step)
        data = orjson.dumps(position.model_dump(mode="json"), option=orjson.OPT_INDENT_2)
        try:
            (folder / POSITION).write_bytes(data)
            keep_digest(folder / POSITION)
            follow_umask(folder)
            for written in [*folder.rglob("*"), folder]:
                sync(written)
        except OSError as error:
            raise RolloutMQError(
                f"{folder} cannot be written: {error.strerror}",
                hint="make room on its disk; the run continues from the checkpoint before",
            ) from error
        self._remove(path)
        folder.rename(path)
        sync(self.folder)
        return path

    def prune(self, keep: int) -> int:
        """Delete all but the newest `keep` checkpoints; return the oldest kept step (0: none)."""
        for step in self.steps()[:-keep]:
            self._remove(self.path(step))
        kept = self.steps()
        return kept[0] if kept else 0

    def oldest_with(self, step: int, keep: int) -> int:
        """Return the oldest step that remains after `write` of `step` and `prune(keep)`."""
        return sorted({*self.steps(), step})[-keep:][0]

    def clear(self, after: int) -> None:
        """Delete what no trainer will continue from: steps after `after`, and unfinished folders.

        A trainer that was replaced, or killed while it wrote or deleted, leaves them.
        """
        for step in self._folders():
            if step > after:
                self._remove(self.path(step))
        for remains in self.folder.glob(".step-*.tmp"):
            shutil.rmtree(remains)

    def _folders(self) -> list[int]:
        names = (path.name for path in self.folder.glob("step-*"))
        return sorted(
            int(name.removeprefix("step-")) for name in names if re.fullmatch(r"step-\d{6,}", name)
        )

    def _remove(self, path: Path) -> None:
        # renamed first: a partly deleted folder must never look like a checkpoint
        if path.exists():
            shutil.rmtree(path.rename(self._hidden(path)))

    def _hidden(self, path: Path) -> Path:
        return path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")


def keep_digest(file: Path) -> None:
    """Write the SHA-256 of a file beside it, as `sha256sum` does."""
    text = f"{digest_of(file)}  {file.name}\n"
    file.with_name(f"{file.name}{DIGEST}").write_text(text, encoding="utf-8")


def digest_of(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def check_state(folder: Path) -> None:
    """Raise ModelError unless the files in `folder` are all there, each with all of its bytes."""
    for path in state_paths(folder):
        with opened(path, "numpy") as file:
            spans_of(file, path)


def state_name(rank: int, size: int) -> str:
    return f"state-{rank:05d}-of-{size:05d}.safetensors"


def state_paths(folder: Path) -> list[Path]:
    """Return the files of all ranks. Raises ModelError where one is missing."""
    found = sorted(folder.glob("state-*-of-*.safetensors"))
    size = int(found[0].stem.rpartition("-")[2]) if found else 1
    paths = [folder / state_name(rank, size) for rank in range(size)]
    missing = [path.name for path in paths if path not in found]
    if missing:
        raise ModelError(
            f"{folder} is not a complete checkpoint: it lacks {missing[0]}",
            hint="remove this checkpoint's folder to use an older one",
        )
    return paths


def opened(path: Path, framework: str) -> Any:
    """Return an open file of tensors for "pt" or "numpy". Raises ModelError for a torn one."""
    # a process that only looks at a run need not have it
    from safetensors import SafetensorError, safe_open

    try:
        # compares the length of the file with its header
        return safe_open(path, framework=framework)
    except (OSError, SafetensorError) as error:
        raise _unreadable(path, error) from error


def spans_of(file: Any, path: Path) -> dict[str, tuple[int, int]]:
    """Return the first row and the number of rows of each sharded tensor."""
    try:
        return dict(orjson.loads((file.metadata() or {}).get(ROWS, "{}")))
    except ValueError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> ModelError:
    return ModelError(
        f"{path} cannot be read: {error}",
        hint="remove this checkpoint's folder to use an older one",
    )
