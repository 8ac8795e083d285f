"""One version of weights in this process's memory, as the files of a model folder.

A learner writes files: here into memory (/dev/shm, if it has room), mapped and deleted at once. So
no disk delays them, and a killed trainer leaves nothing.
"""

from __future__ import annotations

import errno
import logging
import mmap
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir

from buffer.weights import folder_manifest as manifest
from buffer.weights.checksums import FileChecksums
from buffer.weights.new_folder import MEMORY_FOLDER
from buffer.weights.safetensors_files import parse_tensors
from buffer.weights.transport import Save

log = logging.getLogger("rolloutmq.trainer")

TENSORS_SUFFIX = ".safetensors"


class MemorySnapshot:
    """The files of the version `label`, and the manifest that a folder with these files has."""

    def __init__(
        self, label: str, files: Mapping[str, bytes | mmap.mmap], manifest_data: bytes
    ) -> None:
        self.label = label
        self.files = files
        self._manifest = manifest_data
        self.checksum = manifest.digest(manifest_data)

    @classmethod
    def take(cls, label: str, save: Save, prefix: str) -> MemorySnapshot:
        """Take what `save` writes. `prefix`: of the name of the temporary folder."""
        try:
            folder = MEMORY_FOLDER if MEMORY_FOLDER.is_dir() else Path(gettempdir())
            return cls._take(label, save, prefix, folder)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            log.warning(
                "%s is too small for the weights; writing them to %s", MEMORY_FOLDER, gettempdir()
            )
            return cls._take(label, save, prefix, Path(gettempdir()))

    @classmethod
    def _take(cls, label: str, save: Save, prefix: str, parent: Path) -> MemorySnapshot:
        with TemporaryDirectory(prefix=prefix, dir=parent) as name:
            folder = Path(name)
            manifest.write(folder, label, saved=save(folder))
            manifest_data = (folder / manifest.NAME).read_bytes()
            paths = [path for path in sorted(folder.iterdir()) if path.name != manifest.NAME]
            files = {path.name: _map(path) for path in paths}
        return cls(label, files, manifest_data)

    @property
    def weights(self) -> dict[str, mmap.mmap]:
        """The files that are sent: those with tensors, in order."""
        return {
            name: data
            for name, data in self.files.items()
            if name.endswith(TENSORS_SUFFIX) and isinstance(data, mmap.mmap)
        }

    def facts(self) -> dict[str, FileChecksums]:
        """Return size and checksum of each file that is sent."""
        listed = manifest.files_of(self._manifest)
        return {name: listed[name] for name in self.weights}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        files = [parse_tensors(memoryview(data)) for data in self.weights.values()]
        return {name: span.shape for file in files for name, span in file.items()}

    def save(self, folder: Path) -> None:
        """Write the files into a folder, the manifest last."""
        for name, data in (*self.files.items(), (manifest.NAME, self._manifest)):
            (folder / name).write_bytes(data)


def _map(file: Path) -> bytes | mmap.mmap:
    if not file.stat().st_size:
        return b""
    with file.open("rb") as stream:
        # copy on write: torch requires writable memory and never writes to it
        return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
