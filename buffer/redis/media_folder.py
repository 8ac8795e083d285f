"""Files that payloads refer to, such as features of images, routed experts or sampling masks.

    <folder>/owner.json        the run that this folder belongs to
    <folder>/<gid>/<name>      in a payload: run://<gid>/<name>, of a column with #<its CRC-32>

Files are named by their group and freed by that name, so no index is needed and no script reads a
payload (I14). A run:// URI is relative, so it stays valid when the folder moves. Files of other
URIs (http, s3, file) are never opened, copied or deleted.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from buffer.errors import ConfigError, MediaError
from buffer.ids import GID
from buffer.redis.payloads import checksum

SCHEME = "run://"
OWNER = "owner.json"

HEADER_BYTES = 128  # of a .npy file beside its numbers

_npy: Any = np.lib.format  # its functions have no types

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")


class MediaFolder:
    def __init__(self, root: Path, run: str, nonce: str) -> None:
        self.root = root
        self.run = run
        self.nonce = nonce

    def claim(self) -> None:
        """Make the folder this run's. Raises ConfigError if it holds something else."""
        if self.is_ours():
            return
        if self.root.exists() and (not self.root.is_dir() or any(self.root.iterdir())):
            raise ConfigError(
                f"the media folder {self.root} is not empty and not that of run {self.run!r}",
                hint="name a new folder: files in it are deleted with their groups",
            )
        self.root.mkdir(parents=True, exist_ok=True)
        self._write(self.root / OWNER, orjson.dumps(self._owner()))

    def is_ours(self) -> bool:
        """Return whether the folder exists and is this run's. If not, delete nothing in it."""
        file = self.root / OWNER
        return file.is_file() and bool(orjson.loads(file.read_bytes()) == self._owner())

    def _owner(self) -> dict[str, str]:
        return {"run": self.run, "nonce": self.nonce}

    def put(self, gid: str, name: str, data: bytes | memoryview) -> str:
        """Store bytes as a file of a group, all or nothing, and return its URI."""
        uri = f"{SCHEME}{gid}/{name}"
        path = self.path(uri)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._write(path, data)
        return uri

    def path(self, uri: str) -> Path:
        """Return the path of a run:// URI. Raises ConfigError for any other URI."""
        gid, _, name = uri.removeprefix(SCHEME).partition("/")
        if not (uri.startswith(SCHEME) and GID.fullmatch(gid) and NAME.fullmatch(name)):
            raise ConfigError(
                f"{uri[:200]!r} is no file of a run",
                hint="they look like run://math-0000001042/0.npy",
            )
        return self.root / gid / name

    def read(self, uri: str, max_bytes: int) -> bytes:
        """Return the bytes of a run:// file. Raises MediaError if missing, a link, or too large."""
        path = self.path(uri)
        try:
            if path.parent.is_symlink():
                raise MediaError(f"the folder of {uri} is a link", hint="links are never followed")
            # O_NONBLOCK: opening a named pipe would block
            with os.fdopen(
                os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb"
            ) as file:
                data = file.read(max_bytes + 1)
        except OSError as error:
            raise MediaError(
                f"{uri} cannot be read: {error.strerror}",
                hint="[run] media is a folder that all processes see",
            ) from error
        if len(data) > max_bytes:
            raise MediaError(
                f"{uri} has more than {max_bytes} bytes", hint="the reader sets max_bytes"
            )
        return data

    def put_column(self, gid: str, name: str, column: NDArray[Any]) -> str:
        """Store an array as a .npy file of a group, and return its address: `URI#CRC-32`.

        The group has the address among its texts, so its checksum and its seal cover the file.
        """
        file = BytesIO()
        np.save(file, column, allow_pickle=False)
        data = file.getbuffer()
        return f"{self.put(gid, name, data)}#{checksum(data)}"

    def read_column(self, address: str, dtype: str, most: int) -> NDArray[Any]:
        """Return the array of a .npy file with at most `most` numbers of this type.

        Raises ConfigError, MediaError, or ValueError for another file.
        """
        uri, _, crc = address.partition("#")
        data = self.read(uri, HEADER_BYTES + np.dtype(dtype).itemsize * most)
        if (found := checksum(data)) != crc:
            raise MediaError(
                f"{uri} is not the file that its group names: its CRC-32 is {found}, not {crc:.20}",
                hint="something has written to it, or the disk is faulty",
            )
        file = BytesIO(data)
        if (version := _npy.read_magic(file)) != (1, 0):
            raise ValueError(f".npy version {version} is not supported, expected (1, 0)")
        shape, is_fortran, found = _npy.read_array_header_1_0(file)
        if is_fortran or found != np.dtype(dtype):
            raise ValueError(f"numbers of type {found}, expected {np.dtype(dtype)} in C order")
        return np.frombuffer(data, dtype, offset=file.tell()).reshape(shape)

    def gids(self) -> Iterator[str]:
        """Yield the groups that have files, in no order."""
        if self.root.is_dir():
            yield from (path.name for path in self.root.iterdir() if GID.fullmatch(path.name))

    def names(self, gid: str) -> list[str]:
        """Return the files of a group, without links, whose targets may lie elsewhere."""
        folder = self.root / gid
        if not folder.is_dir() or folder.is_symlink():
            return []
        return sorted(
            file.name
            for file in folder.iterdir()
            if NAME.fullmatch(file.name) and file.is_file() and not file.is_symlink()
        )

    def free(self, gid: str) -> None:
        """Delete the files of a group. Harmless when repeated or run concurrently."""
        try:
            shutil.rmtree(self.root / gid)
        except FileNotFoundError:
            # another process deletes it, too; the next sweep finds what both have left
            return

    def _write(self, path: Path, data: bytes | memoryview) -> None:
        # renamed when complete, so that no reader finds half a file
        part = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        part.write_bytes(data)
        part.rename(path)
