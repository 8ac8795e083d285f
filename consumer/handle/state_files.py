"""A trainer's state files, one per rank; without torch, which the launcher does not load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
from safetensors import SafetensorError, safe_open

from buffer.errors import ModelError

ROWS = "rows"  # metadata key: first row and number of all rows of sharded tensors


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
