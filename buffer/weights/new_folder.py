"""A folder that appears complete or not at all."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from buffer.errors import ModelError


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield a folder to write into; rename it to `path` at the end, delete it on an error.

    Raises ModelError if `path` exists.
    """
    if path.exists():
        raise ModelError(f"{path} already exists", hint="remove it, or choose another folder")
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    unfinished.mkdir()
    try:
        yield unfinished
        unfinished.rename(path)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
