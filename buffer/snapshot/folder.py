"""Write and read a snapshot's folder: msgpack files and a manifest, readable in any language.

    manifest.json         {"manifest": {...}, "blake2b": …}, the checksum of the manifest as
                          compact JSON with sorted keys
    index-00000.msgpack   control, lineages, bytes, ledgers, batches, bitmaps, streams, pools,
                          orders, dead letters, records, counters
    payloads-00000.msgpack
    media-00000.msgpack   files that payloads refer to (buffer/redis/media_folder.py)

A file is a sequence of msgpack arrays [kind, key, data], keys without prefix. The manifest is
written last and the folder renamed into place: it is complete or absent.

    kind     data
    hash     [field, value, field, value, …]
    zset     [member, score, member, score, …]
    stream   [[id, [field, value, …]], …]
    list     [value, …]
    bits     [offset in bytes, bytes]
    string   bytes
    file     [offset in bytes, bytes]
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import shutil
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple, get_args

import msgpack
import orjson
from pydantic import BaseModel, ConfigDict, ValidationError

from buffer.errors import SchemaVersionError, SnapshotError
from buffer.redis.media_folder import SCHEME, MediaFolder

FORMAT = "rolloutmq-snapshot"
VERSION = 1
MANIFEST = "manifest.json"

FILE_BYTES = 64 * 2**20  # size from which a file is ended and the next one begun

ITEM_BYTES = 16 * 2**20  # every item is smaller, which bounds the memory of a reader

PART_BYTES = 2**20  # most bytes of a media file in one item

KEY = re.compile(
    r"control|cursors|lineages|dead|bytes|"
    r"(control|ledger|progress|ended|jobs|pool|order|age|batch|dead|group|payload|media):[A-Za-z0-9_.:-]+"
)

Kind = Literal["hash", "zset", "stream", "list", "bits", "string", "file"]
KINDS = get_args(Kind)
SectionName = Literal["index", "payloads", "media"]


class Item(NamedTuple):
    kind: Kind
    key: str
    data: Any


class SnapshotFile(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    bytes: int
    items: int
    blake2b: str


class SnapshotFacts(BaseModel):
    """The manifest; `meta` is that of the run. Counts and sizes are only shown to users."""

    model_config = ConfigDict(extra="forbid", strict=True)

    format: str = FORMAT
    version: int = VERSION
    run: str
    saved_ms: int
    meta: dict[str, str]
    groups: int
    was_running: int
    payload_bytes: int
    media_bytes: int
    files: dict[str, SnapshotFile]


class PartSection:
    """Writes the files of one section, one after the other."""

    def __init__(self, folder: Path, name: SectionName) -> None:
        self.name: SectionName = name
        self.files: dict[str, SnapshotFile] = {}
        self._folder = folder
        self._stream: IO[bytes] | None = None
        self._open_file = ""

    def __enter__(self) -> PartSection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def add(self, item: Item) -> None:
        packed = msgpack.packb(item)
        if self._stream is None:
            self._open_file = f"{self.name}-{len(self.files):05d}.msgpack"
            self._stream = (self._folder / self._open_file).open("wb")
            self._digest = hashlib.blake2b(digest_size=32)
            self._bytes = 0
            self._items = 0
        self._stream.write(packed)
        self._digest.update(packed)
        self._bytes += len(packed)
        self._items += 1
        if self._bytes >= FILE_BYTES:
            self.close()

    def close(self) -> None:
        """End the file in progress, and make it durable."""
        if self._stream is None:
            return
        with self._stream as stream:
            stream.flush()
            os.fsync(stream.fileno())
        self._stream = None
        facts = SnapshotFile(bytes=self._bytes, items=self._items, blake2b=self._digest.hexdigest())
        self.files[self._open_file] = facts

    def discard(self) -> None:
        """Delete what was written, and start again."""
        self.close()
        for name in self.files:
            (self._folder / name).unlink()
        self.files = {}

    def items(self) -> Iterator[Item]:
        for name in self.files:
            yield from read_items(self._folder / name)


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
        _sync(hidden)
        hidden.rename(folder)
        _sync(folder.absolute().parent)
    except OSError as error:
        raise SnapshotError(
            f"cannot write the snapshot: {error}",
            hint="nothing was kept; make room, then save again",
        ) from error
    finally:
        shutil.rmtree(hidden, ignore_errors=True)


def write_manifest(folder: Path, facts: SnapshotFacts) -> None:
    """Write the manifest: the last file, without which a folder is not a snapshot."""
    body = facts.model_dump()
    document = {"manifest": body, "blake2b": _checksum(body)}
    with (folder / MANIFEST).open("wb") as stream:
        stream.write(orjson.dumps(document, option=orjson.OPT_INDENT_2))
        stream.flush()
        os.fsync(stream.fileno())


def read_manifest(folder: Path) -> SnapshotFacts:
    file = folder / MANIFEST
    try:
        document = orjson.loads(file.read_bytes())
    except (OSError, orjson.JSONDecodeError) as error:
        raise SnapshotError(
            f"{folder} is not a snapshot: cannot read {MANIFEST}: {error}"
        ) from error
    body = document.get("manifest") if isinstance(document, dict) else None
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise SnapshotError(f"{file} is not the manifest of a snapshot")
    if body.get("version") != VERSION:
        raise SchemaVersionError(
            f"{file} has version {body.get('version')!r:.40}; this one reads {VERSION}"
        )
    if document.get("blake2b") != _checksum(body):
        raise SnapshotError(f"{file} was altered: its checksum does not match")
    try:
        return SnapshotFacts.model_validate(body)
    except ValidationError as error:
        raise SnapshotError(f"{file}: {error}") from error


def verify(folder: Path, facts: SnapshotFacts) -> None:
    """Read all files; raise SnapshotError unless each is as it was written."""
    for name, expected in facts.files.items():
        file = folder / name
        try:
            with file.open("rb") as stream:
                found = hashlib.file_digest(
                    stream, lambda: hashlib.blake2b(digest_size=32)
                ).hexdigest()
                size = stream.tell()
        except OSError as error:
            raise SnapshotError(f"cannot read {file}: {error}") from error
        if size != expected.bytes:
            raise SnapshotError(
                f"{file} has {size} bytes, not {expected.bytes}: it was truncated or altered"
            )
        if found != expected.blake2b:
            raise SnapshotError(f"{file} was altered: its checksum does not match")


def read_items(file: Path) -> Iterator[Item]:
    """Read the items of a file, in order, in bounded memory. Raises SnapshotError."""
    with file.open("rb") as stream:
        unpacker = msgpack.Unpacker(stream, raw=False, max_buffer_size=ITEM_BYTES, max_ext_len=0)
        while True:
            try:
                raw = unpacker.unpack()
            except msgpack.OutOfData:
                return
            except (ValueError, msgpack.UnpackException) as error:
                raise SnapshotError(f"{file}: not msgpack: {error}") from error
            yield _item(file, raw)


def _item(file: Path, raw: Any) -> Item:
    if isinstance(raw, list) and len(raw) == 3 and raw[0] in KINDS and KEY.fullmatch(str(raw[1])):
        return Item(*raw)
    raise SnapshotError(f"{file}: not a valid item: {str(raw)[:100]}")


def _checksum(body: dict[str, Any]) -> str:
    return hashlib.blake2b(
        orjson.dumps(body, option=orjson.OPT_SORT_KEYS), digest_size=32
    ).hexdigest()


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_items(media: MediaFolder, gids: Iterable[str]) -> Iterator[Item]:
    """Read the media files of groups, in parts; an empty file is an item, too."""
    for gid in gids:
        for name in media.names(gid):
            with (media.root / gid / name).open("rb") as stream:
                offset = 0
                part = stream.read(PART_BYTES)
                while part or not offset:
                    yield Item("file", f"media:{gid}:{name}", [offset, part])
                    offset += max(len(part), 1)
                    part = stream.read(PART_BYTES)


def require_empty(media: MediaFolder) -> None:
    if media.root.exists() and (not media.root.is_dir() or any(media.root.iterdir())):
        raise SnapshotError(
            f"the run's files belong in {media.root}, which is not empty; nothing was changed",
            hint="choose a new folder: media=Path(...)",
            command_hint="choose a new folder with --media FOLDER",
        )


@contextmanager
def restored(media: MediaFolder, items: Iterable[Item]) -> Iterator[None]:
    """Write files into the media folder, or remove it on an error. Raises SnapshotError."""
    hidden = MediaFolder(
        media.root.with_name(f".{media.root.name}.{secrets.token_hex(4)}.tmp"),
        media.run,
        media.nonce,
    )
    written = hidden.root
    try:
        try:
            hidden.claim()
            for item in items:
                _append(hidden, item)
            written = hidden.root.rename(media.root)
        except OSError as error:
            raise SnapshotError(f"cannot restore files to {media.root}: {error}") from error
        yield
    except BaseException:
        shutil.rmtree(written, ignore_errors=True)
        raise


def _append(media: MediaFolder, item: Item) -> None:
    _, gid, name = item.key.split(":")
    offset, part = item.data
    path = media.path(f"{SCHEME}{gid}/{name}")
    path.parent.mkdir(exist_ok=True)
    with path.open("ab") as stream:
        if stream.tell() != offset:
            raise SnapshotError(
                f"{item.key}: a part begins at {offset}, but the file has {stream.tell()} bytes"
            )
        stream.write(part)
        stream.flush()
        os.fsync(stream.fileno())
