from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from tempfile import gettempdir

from buffer.errors import ModelError

MEMORY_FOLDER = Path("/dev/shm")


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield a folder; rename it to `path` at the end, delete it on an error.

    Raises ModelError where `path` exists, FileNotFoundError without the folder that is to have it:
    that of a run which was deleted does not come back.
    """
    if path.exists():
        raise ModelError(f"{path} already exists", hint="remove it, or choose another folder")
    unfinished = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    unfinished.mkdir()
    try:
        yield unfinished
        follow_umask(unfinished)
        unfinished.rename(path)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def follow_umask(folder: Path) -> None:
    """Apply the umask to files in a new folder, which safetensors writes for their owner alone."""
    mode = folder.stat().st_mode & 0o666
    for file in folder.rglob("*"):
        if file.is_file():
            file.chmod(mode)


def temporary_prefix(folder: Path) -> str:
    """Return the prefix of a trainer's temporary folders, the same after its run is made anew."""
    return f"rolloutmq-{blake2b(str(folder.resolve()).encode(), digest_size=8).hexdigest()}-"


def clear_temporary(prefix: str) -> None:
    """Delete the temporary folders of a trainer that was killed while it wrote."""
    for parent in {MEMORY_FOLDER, Path(gettempdir())}:
        for folder in parent.glob(f"{prefix}*"):
            shutil.rmtree(folder, ignore_errors=True)
