"""Versions of weights in Redis itself, for small models and adapters, where no folder is shared.

A version is the files of a folder, cut into chunks, and its manifest (buffer/weights/manifest.py), which is written
last: without it a version is not there. Invariant: what `read` leaves in a folder is what `checksum` speaks of.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from buffer.chunks import CHUNK_BYTES
from buffer.errors import WireError
from buffer.keys import Keys
from buffer.payloads import ROUND_BYTES
from buffer.store import Store
from buffer.weights import manifest as weights_manifest

ADDRESS = "redis:"
"""What the path of weights begins with that are here; their label follows."""

_ROUND = max(1, ROUND_BYTES // CHUNK_BYTES)
"""Chunks in one round trip, and in memory."""


class WeightsChunks:
    """The versions of one run. A label names one: "lineage:version"."""

    def __init__(self, store: Store, keys: Keys) -> None:
        self._store, self._keys = store, keys

    def labels(self) -> list[str]:
        """All versions, whole or not, the oldest first."""
        listed = self._ask("LRANGE", self._keys.weights, 0, -1)
        return list(dict.fromkeys(label.decode() for label in listed))

    def is_whole(self, label: str) -> bool:
        return bool(self._ask("EXISTS", self._keys.weights_part(label)))

    def write(self, label: str, folder: Path) -> str:
        """Store the files of a folder with a manifest; returns their address. An older attempt is replaced."""
        self.drop(label)
        # listed first: whoever clears up finds what was begun
        self._ask("RPUSH", self._keys.weights, label)
        manifest = (folder / weights_manifest.NAME).read_bytes()
        number = 0
        for file, _ in _files(manifest):
            with (folder / file).open("rb") as stream:
                while chunks := list(_next_chunks(stream)):
                    names = [
                        self._keys.weights_part(label, number + place)
                        for place in range(1, len(chunks) + 1)
                    ]
                    sets = [("SET", name, chunk) for name, chunk in zip(names, chunks, strict=True)]
                    self._store.write("weights", sets)
                    number += len(chunks)
        self._ask("SET", self._keys.weights_part(label), manifest)
        return ADDRESS + label

    def read(self, label: str, checksum: str, folder: Path) -> None:
        """Write the files of a version into an empty folder. Raises WireError where they are not what was published."""
        manifest = self._ask("GET", self._keys.weights_part(label))
        if manifest is None:
            raise WireError(
                f"the server holds no weights {label}", hint="newer ones may have taken their place"
            )
        (folder / weights_manifest.NAME).write_bytes(manifest)
        weights_manifest.check(manifest, checksum)
        number = 0
        for file, size in _files(manifest):
            with (folder / file).open("wb") as stream:
                for names in self._rounds(label, number, chunks := -(-size // CHUNK_BYTES)):
                    stream.writelines(self._chunks(label, names))
            number += chunks
        weights_manifest.verify(folder, checksum)

    def drop(self, label: str) -> None:
        """Free a version: first what says that it is there."""
        manifest = self._ask("GETDEL", self._keys.weights_part(label))
        # of one that was never finished the number of chunks is unknown: they have no gaps
        chunks = sum(-(-size // CHUNK_BYTES) for _, size in _files(manifest)) if manifest else 0
        for names in self._rounds(label, 0, chunks):
            self._store.each("weights", [("UNLINK", name) for name in names])
        number = chunks + 1
        while self._ask("UNLINK", self._keys.weights_part(label, number)):
            number += 1
        self._ask("LREM", self._keys.weights, 0, label)

    def _rounds(self, label: str, before: int, chunks: int) -> Iterator[list[str]]:
        """The names of so many chunks that follow `before` others, a round trip's at a time."""
        names = [self._keys.weights_part(label, before + place) for place in range(1, chunks + 1)]
        for start in range(0, chunks, _ROUND):
            yield names[start : start + _ROUND]

    def _chunks(self, label: str, names: list[str]) -> list[bytes]:
        found: list[bytes | None] = self._store.each("weights", [("GET", name) for name in names])
        chunks = [chunk for chunk in found if chunk is not None]
        if len(chunks) != len(found):
            raise WireError(f"{len(found) - len(chunks)} chunks of the weights {label} are gone")
        return chunks

    def _ask(self, *command: Any) -> Any:
        return self._store.each("weights", [command])[0]


def _next_chunks(stream: Any) -> Iterator[bytes]:
    for _ in range(_ROUND):
        if chunk := stream.read(CHUNK_BYTES):
            yield chunk


def _files(manifest: bytes) -> list[tuple[str, int]]:
    """(name, bytes) of each file. Raises WireError for a name that leads out of the folder."""
    files = [(name, int(facts["bytes"])) for name, facts in orjson.loads(manifest)["files"].items()]
    if strange := [name for name, _ in files if Path(name).name != name or name in ("", ".", "..")]:
        raise WireError(f"weights have a file {strange[0]!r}")
    return files
