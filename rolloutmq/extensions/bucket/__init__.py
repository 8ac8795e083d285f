"""Weights in a bucket of S3, Google or Azure, in a folder or in memory: `[weights] url`.

A version is LINEAGE-VERSION-CHECKSUM/, whose manifest is uploaded last. The checksum is that of
the manifest, so that an object never changes: a second upload writes the same bytes.

dies                                what stays
  the trainer, while it uploads     objects without a manifest, deleted by the next trainer
  the trainer, while it deletes     the same: the manifest is deleted first
  a worker, while it downloads      a temporary folder, deleted by the next process of that host

A version that is deleted while it is read is refused; the worker continues with what it has.
obstore (https://developmentseed.org/obstore) finds credentials and endpoint in the environment,
retries requests for three minutes and uploads files in parts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from buffer.errors import LONGEST_REASON, ConfigError, PublicationFailed, RolloutMQError, WireError
from buffer.imports import import_extra
from buffer.weights import folder_manifest as manifest
from buffer.weights.checksums import write_at
from buffer.wire.rollout import PolicyVersion

if TYPE_CHECKING:
    from obstore.store import ObjectStore

PART_BYTES = 8 << 20  # of one request
AT_ONCE = 8  # requests; each ends within 30 s, which takes a link of 18 Mbit/s

_VERSION = re.compile(r"\w+-\d{6,}-[0-9a-f]{32}")


class Bucket:
    """The `Versions` (buffer/weights/copies.py) at a URL. Other objects there are left alone."""

    def __init__(self, url: str) -> None:
        self.prefix = url.rstrip("/") + "/"
        obstore = import_extra("obstore", f"[weights] url = {url!r}")
        self._errors = (obstore.exceptions.BaseError, FileNotFoundError)
        # no client_options: they would replace those of the environment
        self._open = partial(obstore.store.from_url, url)

    @cached_property
    def _store(self) -> ObjectStore:
        store: ObjectStore = self._open()
        return store

    def prepare(self) -> None:
        with self._failing(ConfigError):
            self._open(**({"mkdir": True} if self.prefix.startswith("file:") else {}))

    def names(self) -> list[str]:
        newest: dict[str, Any] = {}
        with self._failing(PublicationFailed):
            for path, modified in self._list():
                name = path.partition("/")[0]
                if _VERSION.fullmatch(name):
                    newest[name] = max(modified, newest.get(name, modified))
        # S3 gives times in seconds
        return sorted(newest, key=lambda name: (newest[name], name))

    def find(self, name: str) -> bytes | None:
        with self._failing(WireError), suppress(FileNotFoundError):
            return bytes(self._store.get(f"{name}/{manifest.NAME}").bytes())
        return None

    def write(self, label: str, folder: Path) -> str:
        weights = PolicyVersion.parse(label)
        record = (folder / manifest.NAME).read_bytes()
        name = f"{weights.lineage}-{weights.version:06d}-{manifest.digest(record)}"
        with self._failing(PublicationFailed):
            for file in [*manifest.files_of(record), manifest.NAME]:
                source, path = folder / file, f"{name}/{file}"
                part = max(PART_BYTES, -(-source.stat().st_size // 10_000))  # S3 takes no more
                self._store.put(path, source, chunk_size=part, max_concurrency=AT_ONCE)
        return name

    def read(self, name: str, record: bytes, folder: Path) -> None:
        for file, facts in manifest.files_of(record).items():
            with (folder / file).open("xb") as stream:
                fetch = partial(self._fetch, f"{name}/{file}", stream.fileno(), facts.bytes)
                with self._failing(WireError), ThreadPoolExecutor(AT_ONCE) as pool:
                    list(pool.map(fetch, range(0, facts.bytes, PART_BYTES)))

    def _fetch(self, path: str, descriptor: int, size: int, start: int) -> None:
        part = self._store.get_range(path, start=start, end=min(start + PART_BYTES, size))
        write_at(descriptor, start, memoryview(part))

    def drop(self, name: str) -> None:
        with self._failing(PublicationFailed):
            paths = [path for path, _ in self._list(f"{name}/")]
            for path in sorted(paths, key=lambda path: not path.endswith(f"/{manifest.NAME}")):
                with suppress(FileNotFoundError):
                    self._store.delete(path)

    def _list(self, prefix: str | None = None) -> Iterator[tuple[str, Any]]:
        for page in self._store.list(prefix):
            for found in page:
                yield found["path"], found["last_modified"]

    @contextmanager
    def _failing(self, kind: type[RolloutMQError]) -> Iterator[None]:
        """Raise `kind` for what the bucket answers, in one line and without a signed query."""
        try:
            yield
        except self._errors as error:
            text = " ".join(str(error).partition("Debug source:")[0].split())
            text = re.sub(r"(https?://[^\s?]+)\?\S+", r"\1", text)[:LONGEST_REASON]
            hint = "check the bucket, and the region and credentials in this process' environment"
            raise kind(f"{self.prefix}: {text}", hint=hint) from error
