"""Payload bytes: written and read outside of any script, under keys that contain the writer's token.

A zombie can never overwrite the winner's bytes (I2), and bytes that no script ever pinned expire by
themselves. What nobody needs any more is listed in `garbage` by the scripts and freed by `collect`, which any
process may run: it is harmless when repeated, interrupted, or done by two at once.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from buffer.errors import PayloadMissing, WireError
from buffer.keys import Keys
from buffer.store import Store

CHUNK_BYTES = 1_048_000
"""Just below an allocator's size class: 1,048,576 would cost 25 % more memory (measured)."""

UNPINNED_S = 3600
"""How long bytes live that no script has pinned."""

READ_BYTES = 8 * 2**20
"""At most so much in one reply: larger ones stall the server for everybody (measured)."""


@dataclass(frozen=True, slots=True)
class PayloadRef:
    """Where the bytes of a group are, and what they must be."""

    gid: str
    token: str
    chunks: int
    size: int
    crc: str


def checksum(data: bytes) -> str:
    """CRC-32 as 8 hex digits."""
    return f"{zlib.crc32(data):08x}"


def chunk_count(size: int) -> int:
    return max(1, -(-size // CHUNK_BYTES))


class PayloadStore:
    """Reads and writes payloads of one run."""

    def __init__(self, store: Store, keys: Keys) -> None:
        self._store = store
        self._keys = keys

    def write(self, gid: str, token: str, data: bytes) -> PayloadRef:
        """Store the bytes of one claim; they expire unless a submit pins them."""
        view = memoryview(data)
        names = self._keys.payload_chunks(gid, token, chunk_count(len(data)))

        def send() -> None:
            for place, name in enumerate(names):
                part = view[place * CHUNK_BYTES : (place + 1) * CHUNK_BYTES]
                # NX: a repeated write must not put a time limit on bytes that a submit has pinned meanwhile
                self._store.bulk.set(name, part, ex=UNPINNED_S, nx=True)

        self._store.retrying("payload write", send)
        return PayloadRef(gid, token, len(names), len(data), checksum(data))

    def write_prompts(self, payloads: dict[str, bytes]) -> None:
        """Store INIT payloads by gid. What is already there stays: it never changes until the group ends."""

        def send() -> None:
            pipe = self._store.bulk.pipeline(transaction=False)
            for gid, data in payloads.items():
                pipe.set(self._keys.payload(gid, "init"), data, ex=UNPINNED_S, nx=True)
            pipe.execute()

        if any(len(data) > CHUNK_BYTES for data in payloads.values()):
            raise WireError("a prompt does not fit into one chunk", hint=f"at most {CHUNK_BYTES} bytes")
        self._store.retrying("prompt write", send)

    def read(self, ref: PayloadRef) -> bytes:
        """The bytes; PayloadMissing when they are gone, WireError when they are not the ones submitted."""
        return self.read_many([ref])[0]

    def read_many(self, refs: Sequence[PayloadRef]) -> list[bytes]:
        """The bytes of many payloads, in order, in replies of bounded size."""
        names = [self._keys.payload_chunks(r.gid, r.token, r.chunks) for r in refs]
        found = self._fetch(
            [name for chunks in names for name in chunks], [r.size for r in refs for _ in range(r.chunks)]
        )
        parts = iter(found)
        return [_join(ref, [next(parts) for _ in range(ref.chunks)]) for ref in refs]

    def read_chunks(self, ref: PayloadRef) -> list[bytes | None]:
        """The chunks as they are, unchecked; None for one that is gone."""
        return self._fetch(self._keys.payload_chunks(ref.gid, ref.token, ref.chunks), [CHUNK_BYTES] * ref.chunks)

    def _fetch(self, names: list[str], sizes: list[int]) -> list[bytes | None]:
        found: list[bytes | None] = []
        start = 0
        while start < len(names):
            stop, expected = start, 0
            while stop < len(names) and (stop == start or expected + min(sizes[stop], CHUNK_BYTES) <= READ_BYTES):
                expected += min(sizes[stop], CHUNK_BYTES)
                stop += 1
            part = names[start:stop]
            found += self._store.retrying("payload read", lambda part=part: self._mget(part))  # type: ignore[misc]
            start = stop
        return found

    def _mget(self, names: list[str]) -> list[bytes | None]:
        return cast("list[bytes | None]", self._store.bulk.mget(names))

    def collect(self, limit: int = 200) -> int:
        """Free up to `limit` payloads that the scripts listed as garbage. Returns how many there were."""
        return self._store.retrying("garbage", lambda: self._collect(limit))

    def _collect(self, limit: int) -> int:
        client: Any = self._store.bulk
        entries: list[bytes] = client.srandmember(self._keys.garbage, limit)
        # looked at after the choice: what was garbage before a snapshot's hold is not in the snapshot
        if not entries or client.exists(self._keys.hold):
            return 0
        names = []
        for entry in entries:
            gid, token, chunks = entry.decode().split(" ")
            names += self._keys.payload_chunks(gid, token, int(chunks))
        pipe = client.pipeline(transaction=False)
        # first the bytes, then the note: dying between the two only means doing it again
        pipe.unlink(*names)
        pipe.srem(self._keys.garbage, *entries)
        pipe.execute()
        return len(entries)


def _join(ref: PayloadRef, parts: list[bytes | None]) -> bytes:
    present = [part for part in parts if part is not None]
    if len(present) != len(parts):
        raise PayloadMissing(f"group {ref.gid}: {len(parts) - len(present)} of {len(parts)} chunks are gone")
    data = present[0] if len(present) == 1 else b"".join(present)
    if ref.size and len(data) != ref.size:
        raise WireError(f"group {ref.gid}: {len(data)} bytes, {ref.size} were submitted")
    if ref.crc and checksum(data) != ref.crc:
        raise WireError(f"group {ref.gid}: checksum {checksum(data)}, {ref.crc} was submitted")
    return data
