"""Checkpoints: the trainer's position, its weights and its optimizer, in one folder that is whole or not there (I6).

<folder>/step-000012/trainer.json           the position (buffer/recovery/position.py)
                     model/                  a Hugging Face folder (config, tokenizer, safetensors)
                     optimizer.safetensors   moments, RNG and counters: no pickle
"""

from __future__ import annotations

import os
import re
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path

import orjson
from pydantic import ValidationError

from buffer.errors import ModelError
from buffer.recovery.position import Position
from buffer.weights.new_folder import new_folder

POSITION = "trainer.json"


class CheckpointFolder:
    """All checkpoints of a run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:06d}"

    def steps(self) -> list[int]:
        """Steps of all whole checkpoints, oldest first."""
        names = (p.parent.name for p in self.folder.glob(f"step-*/{POSITION}"))
        return sorted(int(name.removeprefix("step-")) for name in names if re.fullmatch(r"step-\d{6,}", name))

    def read(self, step: int) -> Position:
        """The position of a checkpoint; ModelError names the file that is broken."""
        file = self.path(step) / POSITION
        try:
            return Position.model_validate_json(file.read_bytes())
        except (OSError, ValidationError) as error:
            raise ModelError(
                f"{file} is not a checkpoint: {error}", hint="remove its folder to use an older one"
            ) from error

    def write(self, position: Position, save: Callable[[Path], None]) -> Path:
        """Write a checkpoint: `save` writes the other parts. It is on disk, and visible, only as a whole; one of the
        same step (of a lineage that ended) is replaced."""
        path = self.path(position.step)
        self._remove(path)
        with new_folder(path) as folder:
            save(folder)
            (folder / POSITION).write_bytes(orjson.dumps(position.model_dump(mode="json"), option=orjson.OPT_INDENT_2))
            _sync(folder)
        _sync_one(self.folder)
        return path

    def prune(self, keep: int) -> int:
        """Delete all but the newest `keep`; returns the oldest step that is kept (0: none)."""
        for step in self.steps()[:-keep]:
            self._remove(self.path(step))
        kept = self.steps()
        return kept[0] if kept else 0

    def oldest_with(self, step: int, keep: int) -> int:
        """The oldest step that is left once a checkpoint of `step` is written, and all but `keep` are pruned."""
        return sorted({*self.steps(), step})[-keep:][0]

    def clear(self, after: int) -> None:
        """Delete what no trainer will go on from: checkpoints of steps after `after`, which a trainer that was
        taken over wrote late, and what was left by one that was killed while it wrote or deleted."""
        for step in self.steps():
            if step > after:
                self._remove(self.path(step))
        for remains in self.folder.glob(".step-*.tmp"):
            shutil.rmtree(remains)

    def _remove(self, path: Path) -> None:
        """Out of sight in one step, then deleted: half of a checkpoint must never look like one."""
        if path.exists():
            shutil.rmtree(path.rename(path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")))


def _sync(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        _sync_one(path)


def _sync_one(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
