"""Files that are whole or absent whenever a process or the machine dies."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def replace_file(file: Path, data: bytes, *, is_private: bool = False) -> None:
    """Write `data` to the disk, then give it the name of `file`. `is_private`: to its owner.

    A process that dies meanwhile leaves the file before.
    """
    part = file.with_name(f".{file.name}.{secrets.token_hex(4)}.tmp")
    part.touch(mode=0o600 if is_private else 0o666)
    with part.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
    part.replace(file)


def sync(path: Path) -> None:
    """Wait until a file, or the list of files of a folder, is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
