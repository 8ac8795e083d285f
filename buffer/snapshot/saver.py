"""Save a run: first its index, as of one instant (`cut.py`), then the payloads that it names.

If the index changes during the copy, it is copied again, a few times; a busy run is paused for it.
Payloads are copied while the run continues: named bytes never change, and the key `snapshot_lock`,
which expires by itself, keeps `PayloadStore.collect` from freeing any.

A record names its group's payload; the manifest names that of an archived group. A missing payload
is an error, except that of a dead group, which is copied as evidence (I11).
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Iterator
from itertools import groupby, islice
from pathlib import Path
from typing import NamedTuple

from buffer.errors import SnapshotError
from buffer.job import PayloadRef
from buffer.model.limits import RunLimits
from buffer.model.manifest import ManifestEntry
from buffer.redis.keys import Keys, payload_name
from buffer.redis.media_folder import MediaFolder
from buffer.redis.payloads import PayloadStore, join
from buffer.redis.script_calls import Advance
from buffer.redis.store import Store
from buffer.snapshot.cut import IndexCut
from buffer.snapshot.folder import (
    Item,
    PartSection,
    SnapshotFacts,
    file_items,
    new_snapshot,
    write_manifest,
)


class Named(NamedTuple):
    """One payload; evidence is copied as it is, complete or not."""

    ref: PayloadRef
    is_evidence: bool = False


class _Archived(NamedTuple):
    """How far a ledger is archived: up to step `freed`, and `slice` groups of the step after it."""

    freed: int = 0
    slice: int = 0

    def covers(self, step: int, place: int) -> bool:
        return step <= self.freed or (step == self.freed + 1 and place < self.slice)


def named_payloads(items: Iterable[Item]) -> Iterator[Named]:
    """Yield the payloads that an index names, in its order, each ledger before its batches."""
    ledgers: dict[str, _Archived] = {}
    batch = ""
    lines_before = 0
    for item in items:
        section, _, name = item.key.partition(":")
        if section == "group":
            yield from _of_record(name, item)
        elif section == "ledger":
            ledgers[name] = _archived(item)
        elif section == "batch":
            lines_before = lines_before if name == batch else 0
            batch = name
            yield from _of_manifest(name, item, lines_before, ledgers)
            lines_before += len(item.data)


def _of_record(gid: str, item: Item) -> Iterator[Named]:
    """Return the newest bytes, and the prompt from which an expired group starts again."""
    fields = dict(zip(item.data[::2], item.data[1::2], strict=True))
    size = int(fields.get("size") or 0)
    crc = fields.get("crc", "")
    if fields["payload"] == "init":
        yield Named(PayloadRef(gid, "init", 1, size, crc))
        return
    yield Named(PayloadRef(gid, "init", 1, 0, ""))
    yield Named(
        PayloadRef(gid, fields["payload"], int(fields["chunks"]), size, crc),
        fields["stage"] == "dead",
    )


def _of_manifest(
    name: str, item: Item, lines_before: int, ledgers: dict[str, _Archived]
) -> Iterator[Named]:
    """Return the payloads of a batch's archived groups; its other groups have records."""
    ledger, _, step = name.rpartition(":")
    archived = ledgers.get(ledger, _Archived())
    for line, text in enumerate(item.data, start=lines_before):
        # line 0 is the header
        if line and archived.covers(int(step), line - 1):
            yield Named(ManifestEntry.parse(text.decode()).payload)


def _archived(item: Item) -> _Archived:
    fields = dict(zip(item.data[::2], item.data[1::2], strict=True))
    return _Archived(int(fields.get(b"freed", 0)), int(fields.get(b"slice", 0)))


HOLD_MS = 60_000
"""Silence after which a saver counts as dead, and payloads are freed again."""

_AT_ONCE = 32  # groups whose payloads are in memory at a time


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
            with PartSection(hidden, "index") as index:
                cut = self._cut(index, attempts, advance, hold)
            with PartSection(hidden, "payloads") as payloads:
                size = self._copy_payloads(index, payloads, advance, hold)
            with PartSection(hidden, "media") as media:
                media_size = self._copy_media(index, media, advance, hold)
            facts = SnapshotFacts(
                run=self._keys.run,
                saved_ms=time.time_ns() // 1_000_000,
                meta=cut.meta,
                groups=cut.groups,
                was_running=cut.was_running,
                payload_bytes=size,
                media_bytes=media_size,
                files=index.files | payloads.files | media.files,
            )
            write_manifest(hidden, facts)
        return facts

    def _cut(self, index: PartSection, attempts: int, advance: Advance, hold: _Hold) -> IndexCut:
        for _ in range(attempts):
            index.discard()
            cut = IndexCut(self._store, self._keys, self._limits)
            written = 0

            def write(item: Item) -> None:
                nonlocal written
                index.add(item)
                written += 1
                hold.renew()
                advance("index", written)

            if cut.copy(write):
                return cut
        raise SnapshotError(
            f"run {self._keys.run!r} changed while its index was copied, {attempts} times; "
            "nothing was kept",
            hint="pause it for the copy (run.control.set_mode), or raise `attempts`",
            command_hint="pause it for the copy: `rolloutmq save --pause`",
        )

    def _copy_payloads(
        self, index: PartSection, payloads: PartSection, advance: Advance, hold: _Hold
    ) -> int:
        size = 0
        for done, item in enumerate(self._read_payloads(index), start=1):
            payloads.add(item)
            size += len(item.data)
            hold.renew()
            advance("payloads", done)
        return size

    def _read_payloads(self, index: PartSection) -> Iterator[Item]:
        named = named_payloads(index.items())
        while some := list(islice(named, _AT_ONCE)):
            chunks = self._payloads.read_chunks([payload.ref for payload in some])
            for payload, parts in zip(some, chunks, strict=True):
                if not payload.is_evidence:
                    join(payload.ref, parts)
                for chunk, part in enumerate(parts):
                    if part is not None:
                        yield self._item(payload.ref, chunk, part)

    def _copy_media(
        self, index: PartSection, media: PartSection, advance: Advance, hold: _Hold
    ) -> int:
        """Copy the media files of all groups whose payloads were copied; return their bytes."""
        size = 0
        if self._media is None:
            return size
        # an index names all payloads of a group one after the other
        payloads = groupby(named_payloads(index.items()), key=lambda named: named.ref.gid)
        gids = (gid for gid, _ in payloads)
        for done, item in enumerate(file_items(self._media, gids), start=1):
            media.add(item)
            size += len(item.data[1])
            hold.renew()
            advance("media", done)
        return size

    def _item(self, ref: PayloadRef, chunk: int, part: bytes) -> Item:
        return Item("string", payload_name(ref.gid, ref.token, chunk), part)


class _Hold:
    """Keeps every process from freeing payloads, as long as it is renewed."""

    def __init__(self, store: Store, keys: Keys) -> None:
        self._store = store
        self._key = keys.snapshot_lock
        self._nonce = secrets.token_hex(16)
        self._renewed_s = 0.0

    def __enter__(self) -> _Hold:
        taken = self._store.retrying("hold", self._take)
        if not taken:
            raise SnapshotError(
                "another snapshot of this run is being saved", hint="wait until it is finished"
            )
        self._renewed_s = time.monotonic()
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
