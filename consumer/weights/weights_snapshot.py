"""One version of weights in this process's memory, as the files that a model folder has.

A learner writes files. Here they are written into memory (/dev/shm, where there is room), mapped, and deleted at once:
so training goes on while they are handed over, nothing passes through a disk, and a killed trainer leaves nothing.
"""

from __future__ import annotations

import errno
import logging
import mmap
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir

import orjson

from buffer.weights import manifest as weights_manifest
from buffer.weights.announcement import FileFacts
from buffer.weights.safetensors_files import parse_tensors

log = logging.getLogger("rolloutmq.trainer")

MEMORY = Path("/dev/shm")
SUFFIX = ".safetensors"


class WeightsSnapshot:
    """`label` names it. `manifest`: the one that a folder with these files has."""

    def __init__(self, label: str, files: Mapping[str, bytes | mmap.mmap], manifest: bytes) -> None:
        self.label, self.files, self._manifest = label, files, manifest
        self.checksum = weights_manifest.digest(manifest)

    @classmethod
    def take(cls, label: str, save: Callable[[Path], None], prefix: str) -> WeightsSnapshot:
        """Of what `save(folder)` writes; `prefix` begins the name of that folder while it is there."""
        try:
            return cls._take(label, save, prefix, MEMORY if MEMORY.is_dir() else Path(gettempdir()))
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            log.warning("%s has no room for the weights; they are written to %s first", MEMORY, gettempdir())
            return cls._take(label, save, prefix, Path(gettempdir()))

    @classmethod
    def _take(cls, label: str, save: Callable[[Path], None], prefix: str, where: Path) -> WeightsSnapshot:
        with TemporaryDirectory(prefix=prefix, dir=where) as name:
            folder = Path(name)
            save(folder)
            weights_manifest.write(folder, label)
            manifest = (folder / weights_manifest.NAME).read_bytes()
            files = {f.name: _map(f) for f in sorted(folder.iterdir()) if f.name != weights_manifest.NAME}
        return cls(label, files, manifest)

    @property
    def weights(self) -> dict[str, mmap.mmap]:
        """The files that are handed over: those with tensors, in order."""
        named = {name: data for name, data in self.files.items() if name.endswith(SUFFIX)}
        return {name: data for name, data in named.items() if isinstance(data, mmap.mmap)}

    def facts(self) -> dict[str, FileFacts]:
        """Of the files that are handed over."""
        listed = orjson.loads(self._manifest)["files"]
        return {name: FileFacts(**listed[name]) for name in self.weights}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of every tensor."""
        places = [parse_tensors(memoryview(data)) for data in self.weights.values()]
        return {name: place.shape for file in places for name, place in file.items()}

    def save(self, folder: Path) -> None:
        """Write the files again, the manifest last."""
        for name, data in (*self.files.items(), (weights_manifest.NAME, self._manifest)):
            (folder / name).write_bytes(data)


def clear(prefix: str) -> None:
    """Delete what a trainer left that was killed while it wrote."""
    for place in {MEMORY, Path(gettempdir())}:
        for folder in place.glob(f"{prefix}*"):
            shutil.rmtree(folder, ignore_errors=True)


def _map(file: Path) -> bytes | mmap.mmap:
    if not file.stat().st_size:
        return b""
    with file.open("rb") as stream:
        # copy on write: torch wants memory that it could write to, and never does
        return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
