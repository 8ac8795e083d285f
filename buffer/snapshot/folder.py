"""Write and read a snapshot's folder: msgpack, tar and a manifest, readable in any language.

    manifest.json      {"manifest": {...}, "blake2b": …}, the checksum of the manifest as
                       compact JSON with sorted keys
    index.msgpack      control, lineages, bytes, ledgers, batches, bitmaps, streams, pools,
                       orders, ages, dead letters, records, counters
    payloads.msgpack
    media.tar          files that payloads refer to, as <gid>/<name>

A msgpack file is a sequence of arrays [kind, key, data], keys without prefix. The manifest is
written last and the folder renamed into place: it is complete or absent.

    kind     data
    hash     [field, value, field, value, …]
    zset     [member, score, member, score, …]
    stream   [[id, [field, value, …]], …]
    list     [value, …]
    bits     [offset in bytes, bytes]
    string   bytes
"""

from __future__ import annotations

import hashlib
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import msgpack
import orjson
from pydantic import BaseModel, ConfigDict

from buffer.errors import SchemaVersionError, SnapshotError, describe

VERSION = 2
MANIFEST = "manifest.json"
INDEX = "index.msgpack"
PAYLOADS = "payloads.msgpack"
MEDIA = "media.tar"

ITEM_BYTES = 16 * 2**20  # every item is smaller, which bounds the memory of a reader

Kind = Literal["hash", "zset", "stream", "list", "bits", "string"]
KINDS = get_args(Kind)


class Item(NamedTuple):
    kind: Kind
    key: str
    data: Any


class SnapshotFile(BaseModel):
    bytes: int
    blake2b: str

    @classmethod
    def of(cls, path: Path) -> SnapshotFile:
        with path.open("rb") as stream:
            digest = hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=32))
            return cls(bytes=stream.tell(), blake2b=digest.hexdigest())


class SnapshotFacts(BaseModel):
    """The manifest; `meta` is that of the run. Counts and sizes are only shown to users."""

    model_config = ConfigDict(extra="forbid", strict=True)

    version: int = VERSION
    run: str
    saved_ms: int
    meta: dict[str, str]
    groups: int
    was_running: int
    payload_bytes: int
    media_bytes: int
    files: dict[str, SnapshotFile]


class ItemFile:
    """Writes the items of one file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stream = path.open("wb")

    def __enter__(self) -> ItemFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()

    def add(self, item: Item) -> None:
        self._stream.write(msgpack.packb(item))

    def discard(self) -> None:
        """Remove what was written, and start again."""
        self._stream.seek(0)
        self._stream.truncate()


@contextmanager
def new_snapshot(folder: Path) -> Iterator[Path]:
    """Make a hidden folder; rename it to `folder` at the end, or remove it on an error."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise SnapshotError(
            f"{folder} exists and is not an empty folder", hint="choose a new folder"
        )
    hidden = folder.absolute().with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        hidden.mkdir(parents=True)
        yield hidden
        sync_all(hidden)
        hidden.rename(folder)
        sync(folder.absolute().parent)
    except OSError as error:
        raise SnapshotError(
            f"cannot write the snapshot: {error}",
            hint="nothing was kept; make room, then save again",
        ) from error
    finally:
        shutil.rmtree(hidden, ignore_errors=True)


def sync(path: Path) -> None:
    """Wait until a file, or the list of files of a folder, is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_all(folder: Path) -> None:
    for path in (*folder.rglob("*"), folder):
        sync(path)


def write_manifest(folder: Path, facts: SnapshotFacts) -> None:
    """Write the manifest: the last file, without which a folder is not a snapshot."""
    body = facts.model_dump()
    document = {"manifest": body, "blake2b": _checksum(body)}
    (folder / MANIFEST).write_bytes(orjson.dumps(document, option=orjson.OPT_INDENT_2))


def read_manifest(folder: Path) -> SnapshotFacts:
    """Return the manifest. Raises SnapshotError, SchemaVersionError."""
    file = folder / MANIFEST
    try:
        document = orjson.loads(file.read_bytes())
        body = document["manifest"]
        if body["version"] != VERSION:
            raise SchemaVersionError(
                f"{file} has version {body['version']!r:.40}; this one reads {VERSION}"
            )
        if document["blake2b"] != _checksum(body):
            raise SnapshotError(f"{file} was altered: its checksum does not match")
        return SnapshotFacts.model_validate(body)
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise SnapshotError(
            f"{folder} is not a snapshot: cannot read {MANIFEST}: {describe(error)}"
        ) from error


def verify(folder: Path, facts: SnapshotFacts) -> None:
    """Read all files; raise SnapshotError unless each is as it was written."""
    for name in (INDEX, PAYLOADS, MEDIA):
        file = folder / name
        try:
            found = SnapshotFile.of(file)
        except OSError as error:
            raise SnapshotError(f"cannot read {file}: {error}") from error
        if found != facts.files.get(name):
            raise SnapshotError(f"{file} was truncated or altered: its checksum does not match")


def read_items(file: Path) -> Iterator[Item]:
    """Read the items of a file, in order, in bounded memory. Raises SnapshotError."""
    with file.open("rb") as stream:
        unpacker = msgpack.Unpacker(stream, raw=False, max_buffer_size=ITEM_BYTES, max_ext_len=0)
        try:
            for kind, key, data in unpacker:
                if kind not in KINDS or not isinstance(key, str):
                    raise SnapshotError(f"{file}: not a valid item: {kind!r:.40} {key!r:.60}")
                yield Item(kind, key, data)
        except (TypeError, ValueError, msgpack.UnpackException) as error:
            raise SnapshotError(f"{file}: not a list of items: {error}") from error


def _checksum(body: dict[str, Any]) -> str:
    sorted_json = orjson.dumps(body, option=orjson.OPT_SORT_KEYS)
    return hashlib.blake2b(sorted_json, digest_size=32).hexdigest()
