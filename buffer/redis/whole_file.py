"""Replace a small file in one step: a process that dies meanwhile leaves the file before."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def replace_file(file: Path, data: bytes, *, is_private: bool = False) -> None:
    """Write `data` to the disk, then give it the name of `file`. `is_private`: to its owner."""
    part = file.with_name(f".{file.name}.{secrets.token_hex(4)}.tmp")
    part.touch(mode=0o600 if is_private else 0o666)
    with part.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
    part.replace(file)
