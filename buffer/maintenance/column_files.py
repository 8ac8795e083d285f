"""Large columns, with megabytes per rollout, as files beside the run.

    <[run] columns>/<run>-<nonce>/<gid>/<name>.npy    in a payload: <gid>/<name>.npy#<CRC-32>

The worker that holds a group writes its files under the token of the claim, before it submits. A
file is never changed. The janitor deletes the files of a group that can no longer be read. A later
sweep deletes what a process left that died in between. No script reads a payload (I14).
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator, Sequence
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from buffer.errors import WireError
from buffer.ids import ENDS, GID, split_group_id
from buffer.ledger.ledger import BatchLedger
from buffer.redis.bounds import KEYS_PER_TRIP
from buffer.redis.keys import Keys
from buffer.redis.payloads import checksum
from buffer.redis.store import Store
from buffer.wire.columns import large_columns
from buffer.wire.rollout import RolloutState, Status
from buffer.wire.sampling_mask import SamplingMask

log = logging.getLogger("rolloutmq.janitor")

INLINE_BYTES = 64 << 10  # smaller columns stay in the payload: a file costs more than it saves

HEADER_BYTES = 128  # of a .npy file beside its numbers

_npy: Any = np.lib.format  # its functions have no types

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")


class ColumnFolder:
    """The files of one run in `root`; without it, columns stay in the payloads."""

    def __init__(self, root: Path | None = None) -> None:
        self.root = root

    @classmethod
    def of_run(cls, columns: str, run: str, nonce: str) -> ColumnFolder:
        """Return the folder of a run in `columns`, which other runs may share; "": none."""
        # the nonce may come from a snapshot that another user wrote
        name = f"{run}-{nonce}".replace("/", "_")
        return cls(Path(columns) / name if columns else None)

    def put_large(self, states: Sequence[RolloutState], gid: str, token: str) -> None:
        """Move the large columns of completed rollouts into files, and name these instead.

        `token`: of the claim, so that a slow worker cannot overwrite the files of a later claim.
        """
        if self.root is None:
            return
        for position, state in enumerate(states):
            # an interrupted rollout keeps its columns: the next worker needs them
            if state.status is not Status.COMPLETED:
                continue
            for column in large_columns().values():
                value = column.get(state)
                if value is None or isinstance(value, str):
                    continue
                array = value.packed() if isinstance(value, SamplingMask) else value
                if array.nbytes > INLINE_BYTES:
                    name = f"{column.name}-{token}-{position}.npy"
                    column.set(state, self.put(gid, name, array))

    def put(self, gid: str, name: str, column: NDArray[Any]) -> str:
        """Store an array as a file of a group, all or nothing, and return its address.

        The group has the address among its texts, so its checksum covers the file.
        """
        assert self.root
        file = BytesIO()
        np.save(file, column, allow_pickle=False)
        data = file.getbuffer()
        path = self.root / gid / name
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{name}.{secrets.token_hex(4)}")
        part.write_bytes(data)
        part.rename(path)
        return f"{gid}/{name}#{checksum(data)}"

    def read(self, address: str, dtype: str, most: int) -> NDArray[Any]:
        """Return an array with at most `most` numbers of this type.

        Raises WireError for an address outside the folder and for another file, such as a link.
        """
        file, _, crc = address.partition("#")
        gid, _, name = file.partition("/")
        if not (GID.fullmatch(gid) and NAME.fullmatch(name)):
            raise WireError(f"{file[:200]!r} is no file of a run")
        if self.root is None:
            raise WireError(f"{file} is a file, and this process has no folder of the run's files")
        most_bytes = HEADER_BYTES + np.dtype(dtype).itemsize * most
        try:
            if (self.root / gid).is_symlink():
                raise WireError(f"the folder of {file} is a link, which is never followed")
            # O_NONBLOCK: opening a named pipe would block
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
            with os.fdopen(os.open(self.root / file, flags), "rb") as stream:
                data = stream.read(most_bytes + 1)
        except OSError as error:
            hint = "[run] columns is a folder that all processes see"
            raise WireError(f"{file} cannot be read: {error.strerror}", hint=hint) from error
        if len(data) > most_bytes:
            raise WireError(f"{file} has more than {most_bytes} bytes")
        if (found := checksum(data)) != crc:
            raise WireError(
                f"{file} is not what its group names: its CRC-32 is {found}, not {crc:.20}",
                hint="something has written to it, or the disk is faulty",
            )
        try:
            return _array(data, np.dtype(dtype))
        except ValueError as error:
            raise WireError(f"{file}: {error}") from error

    def gids(self) -> Iterator[str]:
        """Yield the groups that have files, in no order."""
        if self.root and self.root.is_dir():
            yield from (path.name for path in self.root.iterdir() if GID.fullmatch(path.name))

    def free(self, gid: str) -> None:
        """Delete the files of a group. Harmless when repeated or run concurrently."""
        assert self.root
        try:
            shutil.rmtree(self.root / gid)
        except FileNotFoundError:
            # another process deletes it, too; the next sweep finds what both have left
            return

    def remove(self) -> None:
        """Delete the files of all groups."""
        for gid in list(self.gids()):
            self.free(gid)
        if self.root and self.root.is_dir() and not any(self.root.iterdir()):
            self.root.rmdir()


NO_FILES = ColumnFolder()


def _array(data: bytes, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return the numbers of a .npy file without a copy. Raises ValueError for other types."""
    file = BytesIO(data)
    if (version := _npy.read_magic(file)) != (1, 0):
        raise ValueError(f".npy version {version} is not supported, expected (1, 0)")
    shape, is_fortran, found = _npy.read_array_header_1_0(file)
    if is_fortran or found != dtype:
        raise ValueError(f"numbers of type {found}, expected {dtype} in C order")
    return np.frombuffer(data, dtype, offset=file.tell()).reshape(shape)


class ColumnSweep:
    """Compares the folder of a run with its groups, a part at a time."""

    def __init__(
        self, store: Store, keys: Keys, folder: ColumnFolder, ledgers: Sequence[BatchLedger]
    ) -> None:
        self._store = store
        self._keys = keys
        self._folder = folder
        self._ledgers = ledgers
        self._retained: dict[tuple[str, int], frozenset[str]] = {}
        self._pass: Iterator[str] | None = None
        self._begun_s = float("-inf")

    def sweep(self) -> tuple[int, bool]:
        """Free the next folders; return (groups freed, whether folders are left)."""
        try:
            if self._pass is None:
                if time.monotonic() - self._begun_s < 10.0:  # between two passes
                    return 0, False
                self._pass = self._folder.gids()
                self._begun_s = time.monotonic()
            gids = list(islice(self._pass, KEYS_PER_TRIP))
            if len(gids) < KEYS_PER_TRIP:
                self._pass = None
            ended = self._ended(gids) if gids else []
            for gid in ended:
                self._folder.free(gid)
        except OSError as error:
            log.warning("cannot delete files of ended groups, trying again later: %s", error)
            self._pass = None
            return 0, False
        return len(ended), self._pass is not None

    def _ended(self, gids: Sequence[str]) -> list[str]:
        """Return those of `gids` that have ended and can no longer be read."""
        commands: list[tuple[str | int, ...]] = []
        for gid in gids:
            task, draw = split_group_id(gid)
            commands.append(("EXISTS", self._keys.group(gid)))
            commands += [("GETBIT", self._keys.ended(task, end), draw) for end in ENDS]
        replies = iter(self._store.send("columns", commands))
        ended = []
        for gid in gids:
            lives, *bits = islice(replies, 1 + len(ENDS))
            # a group without a record that has not ended may come back, from a checkpoint
            if not lives and any(bits):
                ended.append(gid)
        # after the records, so that it includes what was archived last
        retained = self._retained_gids() if ended else frozenset()
        return [gid for gid in ended if gid not in retained]

    def _retained_gids(self) -> frozenset[str]:
        """Return archived groups that can be read."""
        kept: dict[tuple[str, int], frozenset[str]] = {}
        halves = []
        for ledger in self._ledgers:
            archived = ledger.archive.steps()
            for step in archived:
                # an archived batch never changes
                kept[ledger.name, step] = self._retained.get((ledger.name, step)) or self._gids(
                    ledger, step
                )
            halves.append(self._gids(ledger, archived.stop))
        self._retained = kept
        return frozenset().union(*kept.values(), *halves)

    def _gids(self, ledger: BatchLedger, step: int) -> frozenset[str]:
        manifest = ledger.manifest(step)
        return frozenset(manifest.gids if manifest else ())
