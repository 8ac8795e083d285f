"""One trained batch as a file: a zip archive, which any tool opens.

    step.json                  the facts of `StepFacts`
    groups/<gid>               the payload: the bytes of the server, or a zstd frame of them
    columns/<gid>/<name>.npy   a file of a large column that a group names

All but groups are in zstd frames. The comment of the archive is the SHA-256 of all bytes before the
comment, as 64 hex digits.
"""

from __future__ import annotations

import hashlib
import json
import struct
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from pydantic import BaseModel, ConfigDict, ValidationError

from buffer.config.assignments import assign
from buffer.errors import RolloutMQError, WireError
from buffer.groups.replay_buffer import mask_stale
from buffer.manifest import Manifest, ManifestEntry
from buffer.redis.payloads import Whole, checksum
from buffer.wire.framing import ZSTD_MAGIC, compress, expand
from buffer.wire.group import RolloutGroup
from buffer.wire.group_bytes import decode_each
from rolloutmq.config.config import Config
from rolloutmq.config.load import validate_config

FORMAT = 1
DIGEST_HEX = 64

_FACTS = "step.json"
_UNREADABLE = (
    *(zipfile.BadZipFile, ValidationError, ValueError, KeyError, OSError, EOFError),
    *(NotImplementedError, RuntimeError, OverflowError, struct.error),
)
"""What zipfile and pydantic raise for files that are damaged."""


AddMember = Callable[[str, Whole], None]


class RecordDamaged(RolloutMQError):
    """Raised for a file of an archive or a bundle that is not what was written."""

    exit_code = 6


class StepFacts(BaseModel):
    """What a step file says of its batch beside the groups."""

    model_config = ConfigDict(extra="forbid")

    format: int = FORMAT
    run: str
    run_nonce: str
    step: int
    manifest: list[str]
    """lines, as the server had them"""
    config: dict[str, Any]
    """of the trainer, without secrets"""
    versions: dict[str, str]
    """by name"""
    threads: int = 0
    """with which torch computes in the trainer; 0: without torch"""
    ranks: int = 1
    """of the trainer, which share the batch"""


class StepFile:
    """A step file that is open for reading. Methods raise RecordDamaged for what is not whole."""

    def __init__(self, name: str, file: BinaryIO) -> None:
        """Read the facts. `name`: of the file, for errors."""
        self.name = name
        self._file = file
        try:
            self._zip = zipfile.ZipFile(file)
            self.facts = StepFacts.model_validate_json(self.member(_FACTS))
            self.manifest = Manifest.parse(self.facts.step, self.facts.manifest)
        except _UNREADABLE as error:
            raise self._damaged(" ".join(str(error).split())) from error
        if self.facts.format != FORMAT:
            raise RolloutMQError(
                f"{name} has format {self.facts.format}, and this version reads {FORMAT}",
                hint="install the version of rolloutmq that wrote it",
            )

    def payload(self, entry: ManifestEntry) -> bytes:
        """Return the bytes of a group as the server had them, compared with their checksum."""
        ref = entry.payload
        name = f"groups/{ref.gid}"
        stored = self._stored(name)
        for data in (stored, self._expanded(name, stored)):
            if len(data) == ref.size and checksum(data) == (ref.crc or checksum(data)):
                return data
        raise self._damaged(f"group {ref.gid} is not what the manifest names")

    def groups(self) -> list[RolloutGroup]:
        """Return the groups as the trainer got them: tokens that were too stale are masked."""
        entries = self.manifest.entries
        crcs = [entry.payload.crc for entry in entries]
        groups = decode_each([self.payload(entry) for entry in entries], crcs)
        mask_stale(self.manifest, groups)
        return groups

    def extract_columns(self, folder: Path) -> None:
        """Write the files of large columns to where a `ColumnFolder` reads them."""
        for name in self._zip.namelist():
            kind, *parts = name.split("/")
            if kind == "columns" and len(parts) == 2 and not {"..", ""} & set(parts):
                path = folder.joinpath(*parts)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(self.member(name))

    def check(self) -> None:
        """Compare all bytes with the digest in the comment, and all groups with the manifest."""
        digest = self._zip.comment.decode(errors="replace")
        if digest != digest_of(self._file):
            raise self._damaged("its bytes do not have the SHA-256 of its comment")
        for entry in self.manifest.entries:
            self.payload(entry)

    def member(self, name: str) -> bytes:
        return self._expanded(name, self._stored(name))

    def _stored(self, name: str) -> bytes:
        try:
            if self._zip.getinfo(name).compress_type != zipfile.ZIP_STORED:  # could be a bomb
                raise self._damaged(f"{name} is compressed by zip")
            return self._zip.read(name)
        except _UNREADABLE as error:
            raise self._damaged(f"{name}: {error}") from error

    def _expanded(self, name: str, data: bytes) -> bytes:
        try:
            return bytes(expand(data))
        except WireError as error:
            raise self._damaged(f"{name}: {error.message}") from error

    def _damaged(self, why: str) -> RecordDamaged:
        return RecordDamaged(
            f"{self.name} is damaged: {why}",
            hint="put a copy of the file in its place; other steps can still be read",
        )


@contextmanager
def step_writer(path: Path, facts: StepFacts) -> Iterator[AddMember]:
    """Make a step file under a new name; the block gets a function that adds a member."""
    with path.open("xb") as file, zipfile.ZipFile(file, "w") as archive:

        def add(name: str, data: Whole) -> None:
            """Add bytes in a zstd frame, unless they are one."""
            whole = bytes(data)
            framed = whole if whole[:4] == ZSTD_MAGIC else compress(whole, "zstd")
            # with one time for all, the same batch has the same bytes
            archive.writestr(zipfile.ZipInfo(name, (2000, 1, 1, 0, 0, 0)), framed)

        add(_FACTS, json.dumps(facts.model_dump(), indent=1).encode())
        yield add
        # of the length of the digest: the end of the archive names the length of its comment
        archive.comment = b"0" * DIGEST_HEX
    with path.open("r+b") as written:
        digest = digest_of(written)
        written.seek(-DIGEST_HEX, 2)
        written.write(digest.encode())


def digest_of(file: BinaryIO) -> str:
    """Return the SHA-256 of all bytes before the comment, which has the length of a digest."""
    left = file.seek(0, 2) - DIGEST_HEX
    file.seek(0)
    digest = hashlib.sha256()
    while left > 0 and (block := file.read(min(left, 1 << 20))):
        digest.update(block)
        left -= len(block)
    return digest.hexdigest()


def config_of(given: Mapping[str, Any], overrides: Sequence[str] = (), **sections: Any) -> Config:
    """Return the config of a step file, with keys of `sections`, then `overrides` on top."""
    tree: dict[str, Any] = _without_none(given)
    for name, keys in sections.items():
        tree[name] = _without_none(tree.get(name, {}) | keys)
    for override in overrides:
        assign(tree, override)
    return validate_config(tree, "the config of the archive")


def _without_none(tree: Any) -> Any:
    """Return a tree as TOML has it: a key without a value is left out."""
    if isinstance(tree, Mapping):
        return {name: _without_none(value) for name, value in tree.items() if value is not None}
    return tree
