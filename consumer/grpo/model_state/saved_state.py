"""The state of a trainer in files: each rank writes what it holds, any number of ranks reads it.

<folder>/state-00000-of-00004.safetensors    of rank 0 of 4

A tensor is whole on every rank, or sharded by rows (its first dimension): "rows" in a file's
metadata has the first row and all rows of these. A reader with other shards reads from several
files. safetensors hold no code: nothing is unpickled.

Invariant: ranks that read with the shards they wrote get back the same bytes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import orjson
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from buffer.errors import ModelError, RolloutMQError
from consumer.handle.checkpoint import ROWS, keep_digest, opened, spans_of, state_name, state_paths
from consumer.handle.ranks import Ranks


class Rows(NamedTuple):
    """`size` rows from `first` on, of a tensor with `total` rows."""

    first: int
    size: int
    total: int


class _Part(NamedTuple):
    file: Any
    shape: tuple[int, ...]
    first: int
    total: int | None

    def overlap(self, name: str, wanted: Rows) -> Tensor:
        start = max(wanted.first - self.first, 0)
        stop = wanted.first + wanted.size - self.first
        rows: Tensor = self.file.get_slice(name)[min(start, self.shape[0]) : max(start, stop)]
        return rows


def write_state(
    folder: Path, state: Mapping[str, Tensor], rows: Mapping[str, Rows], ranks: Ranks
) -> None:
    """Write this rank's tensors into `folder`, to the disk. `rows`: of those that are sharded.

    Raises RolloutMQError where the disk is full.
    """
    file = folder / state_name(ranks.rank, ranks.size)
    spans = {name: [rows[name].first, rows[name].total] for name in state if name in rows}
    try:
        save_file(dict(state), file, metadata={ROWS: orjson.dumps(spans).decode()})
        with file.open("rb") as written:
            os.fsync(written.fileno())
        keep_digest(file)
    except (OSError, SafetensorError) as error:
        raise RolloutMQError(
            f"{file} cannot be written: {error}",
            hint="make room on its disk; the run continues from the checkpoint before",
        ) from error


class SavedState(Mapping[str, Tensor]):
    """Reads the state in `folder`, a tensor at each access, as far as rank `rank` needs it.

    `rows`: which rows of which tensors this rank holds; default: all of all. An unsharded tensor is
    read from the file of the same rank if there is one (random generators differ), else from that
    of rank 0. Raises ModelError where the files are not complete.
    """

    def __init__(self, folder: Path, rows: Mapping[str, Rows] | None = None, rank: int = 0) -> None:
        self._folder = folder
        self._rows = rows or {}
        self._open = ExitStack()
        self._parts: dict[str, list[_Part]] = {}
        paths = state_paths(folder)
        own = rank if rank < len(paths) else 0
        # the own file first: of a tensor that is whole everywhere, the first one counts
        for path in [paths[own], *paths[:own], *paths[own + 1 :]]:
            file = self._open.enter_context(opened(path, "pt"))
            spans = spans_of(file, path)
            for name in file.keys():  # noqa: SIM118 - not a dict
                shape = tuple(file.get_slice(name).get_shape())
                first, total = spans.get(name, (0, None))
                parts = self._parts.setdefault(name, [])
                if total is not None or not parts:
                    parts.append(_Part(file, shape, first, total))
                    parts.sort(key=lambda part: part.first)

    def __enter__(self) -> SavedState:
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def __getitem__(self, name: str) -> Tensor:
        """Return the rows of a tensor that this rank holds. Raises KeyError, ModelError."""
        parts = self._parts[name]
        total = parts[0].total
        if total is None and name not in self._rows:
            whole: Tensor = parts[0].file.get_tensor(name)
            return whole
        if total is None:
            total = parts[0].shape[0]
        wanted = self._rows.get(name, Rows(0, total, total))
        overlaps = [part.overlap(name, wanted) for part in parts]
        found = [rows for rows in overlaps if len(rows)]
        if wanted.total != total or sum(len(rows) for rows in found) != wanted.size:
            raise ModelError(
                f"{self._folder}: {name} does not have the {wanted.total} rows of the model",
                hint="resume with the model and the config of the checkpoint, "
                "or remove this checkpoint's folder to use an older one",
            )
        if len(found) == 1:
            return found[0]
        return torch.cat(found) if found else overlaps[0]
