"""Save a run: first its index, as of one instant (`cut.py`), then the payloads that it names.

If the index changes during the copy, it is copied again, a few times; a busy run is paused for it.
Payloads are copied while the run continues: named bytes never change, and the key `snapshot_lock`,
which expires by itself, keeps `PayloadStore.collect` from freeing any.

A record names its group's payload; the manifest names that of an archived group. A missing payload
is an error, except that of a dead group, which is copied as evidence (I11).
"""

from __future__ import annotations

import secrets
import tarfile
import time
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from buffer.errors import SnapshotError
from buffer.job import PayloadRef
from buffer.limits import RunLimits
from buffer.manifest import ManifestEntry
from buffer.redis.keys import Keys, payload_name
from buffer.redis.media_folder import MediaFolder
from buffer.redis.payloads import PayloadStore, join
from buffer.redis.scripts import Advance
from buffer.redis.store import Store
from buffer.snapshot.cut import IndexCut
from buffer.snapshot.folder import (
    INDEX,
    MEDIA,
    PAYLOADS,
    Item,
    ItemFile,
    SnapshotFacts,
    SnapshotFile,
    new_snapshot,
    read_items,
    write_manifest,
)

HOLD_MS = 60_000
"""Silence after which a saver counts as dead, and payloads are freed again."""

_AT_ONCE = 32  # groups whose payloads are in memory at a time


class Named(NamedTuple):
    """One payload; evidence is copied as it is, complete or not."""

    ref: PayloadRef
    is_evidence: bool = False


def named_payloads(items: Iterable[Item]) -> Iterator[Named]:
    """Yield the payloads that an index names, each once: those of batches before records."""
    in_batches: set[tuple[str, str]] = set()
    for item in items:
        section, _, name = item.key.partition(":")
        if section == "batch":
            _header, *lines = item.data
            for line in lines:
                ref = ManifestEntry.parse(line.decode()).payload
                in_batches.add((ref.gid, ref.token))
                yield Named(ref)
        elif section == "group":
            for named in _of_record(name, item):
                if (name, named.ref.token) not in in_batches:
                    yield named


def _of_record(gid: str, item: Item) -> Iterator[Named]:
    """Return the newest bytes, and the prompt from which an expired group starts again."""
    fields = dict(zip(item.data[::2], item.data[1::2], strict=True))
    token = fields["payload"]
    if token != "init":
        yield Named(PayloadRef(gid, "init", 1, 0, ""))
    size = int(fields.get("size") or 0)
    ref = PayloadRef(gid, token, int(fields["chunks"]), size, fields.get("crc", ""))
    yield Named(ref, is_evidence=token != "init" and fields["stage"] == "dead")


class SnapshotSaver:
    def __init__(
        self,
        store: Store,
        keys: Keys,
        limits: RunLimits,
        payloads: PayloadStore,
        media: MediaFolder | None,
    ) -> None:
        self._store = store
        self._keys = keys
        self._limits = limits
        self._payloads = payloads
        self._media = media

    def save(self, folder: Path, attempts: int, advance: Advance) -> SnapshotFacts:
        """Save the run. Raises SnapshotError: a payload is missing, or the index kept changing."""
        with new_snapshot(folder) as hidden, _Hold(self._store, self._keys) as hold:

            def copied(what: str, done: int) -> None:
                hold.renew()
                advance(what, done)

            with ItemFile(hidden / INDEX) as index:
                cut = self._cut(index, attempts, copied)
            sizes = {
                PAYLOADS: self._copy_payloads(hidden, copied),
                MEDIA: self._copy_media(hidden, copied),
            }
            facts = SnapshotFacts(
                run=self._keys.run,
                saved_ms=time.time_ns() // 1_000_000,
                meta=cut.meta,
                groups=cut.groups,
                was_running=cut.was_running,
                payload_bytes=sizes[PAYLOADS],
                media_bytes=sizes[MEDIA],
                files={name: SnapshotFile.of(hidden / name) for name in (INDEX, *sizes)},
            )
            write_manifest(hidden, facts)
        return facts

    def _cut(self, index: ItemFile, attempts: int, advance: Advance) -> IndexCut:
        for _ in range(attempts):
            index.discard()
            cut = IndexCut(self._store, self._keys, self._limits)
            if cut.copy(index.add, advance):
                return cut
        raise SnapshotError(
            f"run {self._keys.run!r} changed while its index was copied, {attempts} times; "
            "nothing was kept",
            hint="pause it for the copy (run.control.set_mode), or raise `attempts`",
            command_hint="pause it for the copy: `rolloutmq save --pause`",
        )

    def _copy_payloads(self, folder: Path, advance: Advance) -> int:
        size = 0
        named = named_payloads(read_items(folder / INDEX))
        with ItemFile(folder / PAYLOADS) as payloads:
            for done, item in enumerate(self._read_payloads(named), start=1):
                payloads.add(item)
                size += len(item.data)
                advance("payloads", done)
        return size

    def _read_payloads(self, named: Iterator[Named]) -> Iterator[Item]:
        while some := list(islice(named, _AT_ONCE)):
            chunks = self._payloads.read_chunks([payload.ref for payload in some])
            for (ref, is_evidence), parts in zip(some, chunks, strict=True):
                if not is_evidence:
                    join(ref, parts)
                for chunk, part in enumerate(parts):
                    if part is not None:
                        yield Item("string", payload_name(ref.gid, ref.token, chunk), part)

    def _copy_media(self, folder: Path, advance: Advance) -> int:
        """Copy the media files of all groups whose payloads were copied; return their bytes."""
        size = 0
        with tarfile.open(folder / MEDIA, "w") as tar:
            if self._media is None:
                return 0
            gids = {named.ref.gid for named in named_payloads(read_items(folder / INDEX))}
            names = [f"{gid}/{name}" for gid in sorted(gids) for name in self._media.names(gid)]
            for done, name in enumerate(names, start=1):
                file = self._media.root / name
                tar.add(file, name)
                size += file.stat().st_size
                advance("media", done)
        return size


class _Hold:
    """Keeps every process from freeing payloads, as long as it is renewed."""

    def __init__(self, store: Store, keys: Keys) -> None:
        self._store = store
        self._key = keys.snapshot_lock
        self._nonce = secrets.token_hex(16)
        self._renewed_s = time.monotonic()

    def __enter__(self) -> _Hold:
        if not self._store.retrying("hold", self._take):
            raise SnapshotError(
                "another snapshot of this run is being saved", hint="wait until it is finished"
            )
        return self

    def _take(self) -> bool:
        # a repeated call finds its own nonce
        made = self._store.bulk.set(self._key, self._nonce, nx=True, px=HOLD_MS)
        return bool(made) or self._is_ours()

    def _is_ours(self) -> bool:
        return bool(self._store.bulk.get(self._key) == self._nonce.encode())

    def renew(self) -> None:
        """Prolong the hold when it is time: cheap enough to be called for every item."""
        if time.monotonic() - self._renewed_s < HOLD_MS / 6000:
            return
        if not self._store.retrying("hold", self._prolong):
            raise SnapshotError(
                f"saving stalled for more than {HOLD_MS // 1000} s; payloads may have been freed",
                hint="save again",
            )
        self._renewed_s = time.monotonic()

    def _prolong(self) -> bool:
        return self._is_ours() and bool(self._store.bulk.pexpire(self._key, HOLD_MS))

    def __exit__(self, *_: object) -> None:
        self._store.retrying("hold", self._drop)

    def _drop(self) -> None:
        if self._is_ours():
            self._store.bulk.delete(self._key)
