"""Files that payloads refer to: features of images, routed experts, whatever is too big or too odd
for a column.

A run may own one folder. What lies in it is named by the group that it belongs to, so that it can
be freed by that name: no index is needed, and no script ever looks into a payload (I14).

    <folder>/owner.json        the run that this folder belongs to
    <folder>/<gid>/<name>      said in a payload as run://<gid>/<name>

`run://` is relative, so a URI stays true wherever the folder is. Every other URI (http, s3, file)
is only said: it is never opened, copied or deleted.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

import orjson

from buffer.errors import ConfigError, MediaError
from buffer.model.ids import GID

SCHEME = "run://"
OWNER = "owner.json"
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")


class MediaFolder:
    """The folder of one run."""

    def __init__(self, root: Path, run: str, nonce: str) -> None:
        self.root = root
        self.run = run
        self.nonce = nonce

    # -- whose it is ---------------------------------------------------------

    def claim(self) -> None:
        """Make it this run's. ConfigError where it holds something else."""
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
        """Whether it is there and this run's: otherwise nothing in it may be deleted."""
        file = self.root / OWNER
        return file.is_file() and bool(orjson.loads(file.read_bytes()) == self._owner())

    def _owner(self) -> dict[str, str]:
        return {"run": self.run, "nonce": self.nonce}

    # -- files ---------------------------------------------------------------

    def put(self, gid: str, name: str, data: bytes | memoryview) -> str:
        """Keep the bytes as a file of a group, whole or not at all; returns its URI."""
        uri = f"{SCHEME}{gid}/{name}"
        path = self.path(uri)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._write(path, data)
        return uri

    def path(self, uri: str) -> Path:
        """Where the file of a run:// URI lies. ConfigError for any other one."""
        gid, _, name = uri.removeprefix(SCHEME).partition("/")
        if not (uri.startswith(SCHEME) and GID.fullmatch(gid) and NAME.fullmatch(name)):
            raise ConfigError(
                f"{uri[:200]!r} is no file of a run",
                hint="they look like run://math-0000001042/0.npy",
            )
        return self.root / gid / name

    def read(self, uri: str, max_bytes: int) -> bytes:
        """The bytes of a run:// file of this run. MediaError where there is none, it is a link, or
        larger.
        """
        path = self.path(uri)
        try:
            if path.parent.is_symlink():
                raise MediaError(f"the folder of {uri} is a link", hint="links are never followed")
            # a pipe would be waited for
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
                f"{uri} has more than {max_bytes} bytes", hint="max_bytes of whoever reads it"
            )
        return data

    def gids(self) -> Iterator[str]:
        """Groups that have files, in no order."""
        if self.root.is_dir():
            yield from (path.name for path in self.root.iterdir() if GID.fullmatch(path.name))

    def names(self, gid: str) -> list[str]:
        """Files of a group. Links are none: they belong to somebody else."""
        folder = self.root / gid
        if not folder.is_dir() or folder.is_symlink():
            return []
        return sorted(
            file.name
            for file in folder.iterdir()
            if NAME.fullmatch(file.name) and file.is_file() and not file.is_symlink()
        )

    def free(self, gid: str) -> None:
        """Delete the files of a group. Harmless when repeated, or done by two at once."""
        try:
            shutil.rmtree(self.root / gid)
        except FileNotFoundError:
            # somebody else deletes it, too; what either leaves is found again
            return

    def _write(self, path: Path, data: bytes | memoryview) -> None:
        part = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        part.write_bytes(data)
        part.rename(path)
