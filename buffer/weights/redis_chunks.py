"""The transport "redis": versions of weights on the run's server, for small models and adapters.

A version is its manifest, written last, and the chunks of the files that it lists.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from buffer.errors import LostRun, WireError
from buffer.redis.bounds import BYTES_PER_TRIP, BYTES_PER_VALUE
from buffer.redis.keys import Keys
from buffer.redis.store import Store
from buffer.weights import folder_manifest as manifest
from buffer.wire.rollout import PolicyVersion

IN_CHUNKS = "redis:"  # scheme of addresses: the version's label follows

_CHUNKS_AT_ONCE = max(1, BYTES_PER_TRIP // BYTES_PER_VALUE)  # and in memory


class VersionStore:
    """The `Versions` of one run on its server. A label names one: "lineage:version"."""

    prefix = IN_CHUNKS

    def __init__(self, store: Store, keys: Keys) -> None:
        self._store = store
        self._keys = keys

    def prepare(self) -> None:
        """Do nothing: the server is there."""

    def names(self) -> list[str]:
        listed = self._call("LRANGE", self._keys.weights, 0, -1)
        return list(dict.fromkeys(label.decode() for label in listed))

    def find(self, label: str) -> bytes | None:
        record: bytes | None = self._call("GET", self._keys.weights_part(label))
        return record

    def write(self, label: str, folder: Path) -> str:
        """Store the files of a folder that has a manifest. Raises LostRun."""
        self.drop(label)  # an older attempt
        self._list(label, b"")
        record = (folder / manifest.NAME).read_bytes()
        number = 0
        for file, _ in _files(record):
            with (folder / file).open("rb") as stream:
                # the chunks of one round trip; none at the end of the file
                reads = partial(stream.read, BYTES_PER_VALUE)
                while chunks := list(islice(iter(reads, b""), _CHUNKS_AT_ONCE)):
                    names = self._chunk_names(label, number, len(chunks))
                    sets = [("SET", name, chunk) for name, chunk in zip(names, chunks, strict=True)]
                    self._store.send("weights", sets)
                    number += len(chunks)
        try:
            self._list(label, record)
        except LostRun:  # removed meanwhile: nothing else deletes the chunks
            self.drop(label)
            raise
        return label

    def read(self, label: str, record: bytes, folder: Path) -> None:
        number = 0
        for file, size in _files(record):
            count = _chunk_count(size)
            with (folder / file).open("wb") as stream:
                for names in _batches(self._chunk_names(label, number, count)):
                    found = self._store.send("weights", [("GET", name) for name in names])
                    if lost := found.count(None):
                        raise WireError(f"{lost} chunks of the weights {label} are missing")
                    stream.writelines(found)
            number += count

    def drop(self, label: str) -> None:
        """Delete a version, its record first."""
        record = self._call("GETDEL", self._keys.weights_part(label))
        # an unfinished version has no record
        count = sum(_chunk_count(size) for _, size in _files(record)) if record else 0
        for names in _batches(self._chunk_names(label, 0, count)):
            self._store.send("weights", [("UNLINK", name) for name in names])
        # of an unfinished version the number of chunks is unknown, but they have no gaps
        number = count + 1
        while self._call("UNLINK", self._keys.weights_part(label, number)):
            number += 1
        self._call("LREM", self._keys.weights, 0, label)

    def _list(self, label: str, record: bytes) -> None:
        lineage, version = PolicyVersion.parse(label)
        keys = self._keys.slots(lineage=lineage, version=version)
        self._store.call("list_weights", keys, {"label": label, "manifest": record})

    def _chunk_names(self, label: str, before: int, count: int) -> list[str]:
        """Return the keys of `count` chunks that follow `before` others."""
        return [self._keys.weights_part(label, before + n) for n in range(1, count + 1)]

    def _call(self, *command: Any) -> Any:
        return self._store.send("weights", [command])[0]


def _chunk_count(size: int) -> int:
    return -(-size // BYTES_PER_VALUE)


def _batches(names: list[str]) -> Iterator[list[str]]:
    for start in range(0, len(names), _CHUNKS_AT_ONCE):
        yield names[start : start + _CHUNKS_AT_ONCE]


def _files(record: bytes) -> list[tuple[str, int]]:
    """Return (name, bytes) of each file. Raises WireError for a name that leaves the folder."""
    return [(name, facts.bytes) for name, facts in manifest.files_of(record).items()]
