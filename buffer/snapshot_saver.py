"""Saving a run: first its index, as of one instant (`snapshot_cut`), then the payloads that this index names.

The index is copied again where it moved meanwhile, a few times; a busy run is paused for that copy (workers may keep
what they hold). Payloads are copied afterwards, while the run goes on: bytes that a record names never change, and the
key `hold` keeps `PayloadStore.collect` from freeing any. The hold expires by itself; a payload that is gone
nevertheless is an error, never a gap; only that of a dead group may be what killed it.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from buffer.errors import SnapshotError
from buffer.keys import Keys
from buffer.limits import RunLimits
from buffer.payloads import CHUNK_BYTES, PayloadRef, PayloadStore
from buffer.snapshot_cut import Advance, IndexCut
from buffer.snapshot_folder import Item, Section, SnapshotFacts, new_snapshot, write_manifest
from buffer.snapshot_payloads import named_payloads
from buffer.store import Store

HOLD_MS = 60_000
"""A saver that was silent for so long is taken for dead, and payloads are freed again."""

_AT_ONCE = 32
"""Groups whose payloads are in memory at a time."""


class SnapshotSaver:
    """Writes one run to a folder."""

    def __init__(self, store: Store, keys: Keys, limits: RunLimits, payloads: PayloadStore) -> None:
        self._store, self._keys, self._limits, self._payloads = store, keys, limits, payloads

    def save(self, folder: Path, attempts: int, advance: Advance) -> SnapshotFacts:
        """Raises SnapshotError where the index never stood still, or a payload could not be copied."""
        with new_snapshot(folder) as hidden, _Hold(self._store, self._keys) as hold:
            with Section(hidden, "index") as index:
                cut = self._cut(index, attempts, advance, hold)
            with Section(hidden, "payloads") as payloads:
                size = self._copy_payloads(index, payloads, advance, hold)
            facts = SnapshotFacts(
                run=self._keys.run,
                saved_ms=time.time_ns() // 1_000_000,
                meta=cut.meta,
                groups=cut.groups,
                was_running=cut.was_running,
                payload_bytes=size,
                files=index.files | payloads.files,
            )
            write_manifest(hidden, facts)
        return facts

    def _cut(self, index: Section, attempts: int, advance: Advance, hold: _Hold) -> IndexCut:
        for _ in range(attempts):
            index.discard()
            cut, written = IndexCut(self._store, self._keys, self._limits), 0

            def write(item: Item) -> None:
                nonlocal written
                index.add(item)
                written += 1
                hold.renew()
                advance("index", written)

            if cut.copy(write):
                return cut
        raise SnapshotError(
            f"run {self._keys.run!r} moved while its index was copied, {attempts} times; nothing was kept",
            hint="let it stand still for a moment: `rolloutmq save --pause`, or pause it first",
        )

    def _copy_payloads(self, index: Section, payloads: Section, advance: Advance, hold: _Hold) -> int:
        size = 0
        for done, item in enumerate(self._read_payloads(index), start=1):
            payloads.add(item)
            size += len(item.data)
            hold.renew()
            advance("payloads", done)
        return size

    def _read_payloads(self, index: Section) -> Iterator[Item]:
        named = named_payloads(index.items())
        while some := list(islice(named, _AT_ONCE)):
            whole = [ref for ref, is_evidence in some if not is_evidence]
            for ref, data in zip(whole, self._payloads.read_many(whole), strict=True):
                for chunk in range(ref.chunks):
                    yield self._item(ref, chunk, data[chunk * CHUNK_BYTES : (chunk + 1) * CHUNK_BYTES])
            for ref in (ref for ref, is_evidence in some if is_evidence):
                for chunk, part in enumerate(self._payloads.read_chunks(ref)):
                    if part is not None:
                        yield self._item(ref, chunk, part)

    def _item(self, ref: PayloadRef, chunk: int, part: bytes) -> Item:
        key = self._keys.payload(ref.gid, ref.token, chunk)
        return Item("string", key.removeprefix(self._keys.prefix), part)


class _Hold:
    """While it is there, nobody frees payloads."""

    def __init__(self, store: Store, keys: Keys) -> None:
        self._store, self._key, self._nonce = store, keys.hold, secrets.token_hex(16)
        self._renewed_s = 0.0

    def __enter__(self) -> _Hold:
        client: Any = self._store.bulk
        taken = self._store.retrying("hold", lambda: self._take(client))
        if not taken:
            raise SnapshotError("another snapshot of this run is being made", hint="wait for its end")
        self._renewed_s = time.monotonic()
        return self

    def _take(self, client: Any) -> bool:
        # a repeated call finds its own nonce
        made = client.set(self._key, self._nonce, nx=True, px=HOLD_MS)
        return bool(made) or self._is_ours(client)

    def _is_ours(self, client: Any) -> bool:
        return bool(client.get(self._key) == self._nonce.encode())

    def renew(self) -> None:
        """Cheap enough to be called for every item."""
        if time.monotonic() - self._renewed_s < HOLD_MS / 6000:
            return
        client: Any = self._store.bulk
        if not self._store.retrying("hold", lambda: self._is_ours(client) and client.pexpire(self._key, HOLD_MS)):
            raise SnapshotError(
                f"the snapshot stood still for more than {HOLD_MS // 1000} s; its payloads may have been freed",
                hint="save again",
            )
        self._renewed_s = time.monotonic()

    def __exit__(self, *_: object) -> None:
        client: Any = self._store.bulk

        def drop() -> None:
            if self._is_ours(client):
                client.delete(self._key)

        self._store.retrying("hold", drop)
