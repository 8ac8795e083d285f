"""Write and read a snapshot's folder, which any language can read.

    manifest.json    {"manifest": {...}, "blake2b": …}: the checksum is of the manifest as compact
                     JSON with sorted keys; it has a checksum of every other file
    keys.msgpack     arrays [type, key, value] one behind the other, keys without the run's prefix
    files/           of large columns, as <gid>/<name>

    type     value                                    type     value
    hash     [field, value, field, value, …]          list     [value, …]
    zset     [member, score, member, score, …]        set      [member, …]
    stream   [[id, [field, value, …]], …]             string   bytes

The manifest is written last and the folder renamed into place: it is complete or absent.
"""

from __future__ import annotations

import hashlib
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgpack
import orjson
from pydantic import BaseModel, ConfigDict

from buffer.errors import SchemaVersionError, SnapshotError, describe
from buffer.redis.whole_file import sync

VERSION = 3
MANIFEST = "manifest.json"
KEYS = "keys.msgpack"
FILES = "files"


class Item(NamedTuple):
    kind: str
    key: str
    value: Any


class SnapshotFacts(BaseModel):
    """The manifest. `files`: BLAKE2b by name; `keys` and `bytes` are only shown to users."""

    model_config = ConfigDict(extra="forbid", strict=True)

    version: int = VERSION
    run: str
    saved_ms: int
    keys: int
    bytes: int
    files: dict[str, str]


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
        for path in (*hidden.rglob("*"), hidden):
            sync(path)
        hidden.rename(folder)
        sync(folder.absolute().parent)
    except OSError as error:
        raise SnapshotError(
            f"cannot write the snapshot: {error}",
            hint="nothing was kept; make room, then save again",
        ) from error
    finally:
        shutil.rmtree(hidden, ignore_errors=True)


def read_items(folder: Path) -> Iterator[Item]:
    """Read the keys of a snapshot, one at a time. Raises SnapshotError."""
    file = folder / KEYS
    with file.open("rb") as stream:
        try:
            # the pool of the largest run that was tried has 60 MB
            for kind, key, value in msgpack.Unpacker(stream, max_buffer_size=1 << 30):
                yield Item(kind, key, value)
        except (TypeError, ValueError, msgpack.UnpackException) as error:
            raise SnapshotError(f"{file}: not a list of keys: {error}") from error


def seal(folder: Path, run: str, saved_ms: int, keys: int) -> SnapshotFacts:
    """Write the manifest of the files in the folder: the last file, without which it is nothing."""
    files = {name: _checksum(folder / name) for name in _names(folder)}
    size = sum((folder / name).stat().st_size for name in files)
    facts = SnapshotFacts(run=run, saved_ms=saved_ms, keys=keys, bytes=size, files=files)
    body = facts.model_dump()
    document = {"manifest": body, "blake2b": _checksum_of(body)}
    (folder / MANIFEST).write_bytes(orjson.dumps(document, option=orjson.OPT_INDENT_2))
    return facts


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
        if document["blake2b"] != _checksum_of(body):
            raise SnapshotError(f"{file} was altered: its checksum does not match")
        return SnapshotFacts.model_validate(body)
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise SnapshotError(
            f"{folder} is not a snapshot: cannot read {MANIFEST}: {describe(error)}"
        ) from error


def verify(folder: Path, facts: SnapshotFacts) -> None:
    """Read all files; raise SnapshotError unless each is as it was written."""
    for name in sorted({*facts.files, *_names(folder)}):
        try:
            found = _checksum(folder / name)
        except OSError as error:
            raise SnapshotError(f"cannot read {folder / name}: {error}") from error
        if found != facts.files.get(name):
            raise SnapshotError(f"{folder / name} was truncated or altered: its checksum differs")


def _names(folder: Path) -> Iterator[str]:
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != MANIFEST:
            yield path.relative_to(folder).as_posix()


def _checksum(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=32)).hexdigest()


def _checksum_of(body: dict[str, Any]) -> str:
    sorted_json = orjson.dumps(body, option=orjson.OPT_SORT_KEYS)
    return hashlib.blake2b(sorted_json, digest_size=32).hexdigest()
