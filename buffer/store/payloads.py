"""Payload bytes: written and read outside of any script, under keys that contain the writer's
token.

A zombie can never overwrite the winner's bytes (I2), and bytes that no script ever pinned expire by
themselves. What nobody needs any more is listed in `garbage` by the scripts and freed by `collect`,
which any process may run: it is harmless when repeated, interrupted, or done by two at once.

In a cluster, bytes lie in other slots than the script that accepts them: it believes its caller,
and lists them.

They were written with an expiry. Whoever called the script keeps them from expiring right after it;
where that process died first, any janitor does, long before they expire. Each step is harmless when
it is repeated (I13). Where `wait_replicas` is set, those of every node are waited for before the
script is called, and before the list forgets what was pinned. Else bytes may be lost with their
node: who reads them misses them (PayloadMissing), never silently, and they are made again.

How a payload is cut into values of Redis, so that the allocator wastes next to nothing.

Redis 7 allocates with jemalloc, in classes of four sizes per doubling: 165,888 bytes in one value
occupy 196,608. Cut once at the largest class that fits, the same bytes occupy 163,840 and 2,560.
Two chunks are enough: what is left behind the cut is less than a fifth of the whole, and at most a
fifth of that is wasted again.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from threading import Event
from typing import NamedTuple, TypeVar

from isal import isal_zlib

from buffer.errors import PayloadMissing, WireError
from buffer.model.compression import Compression, compress
from buffer.model.job import PayloadRef
from buffer.store.bulk_io import Command, Parts
from buffer.store.keys import Keys
from buffer.store.store import Store

CHUNK_BYTES = 1_048_000
"""At most in one chunk; just below a size class: 1,048,576 would cost 25 % more memory (measured)."""

_HEADER_BYTES = 16
"""More than Redis puts around a string in the same allocation (10)."""

_CUT_FROM_BYTES = 8192
"""Below it a second key costs more than it saves."""

_MOST_WASTE = 1 / 16


def chunk_sizes(size: int) -> list[int]:
    """Bytes of each chunk of a payload of `size` bytes, in order; a reader takes any other cut as
    well.
    """
    full, rest = divmod(size, CHUNK_BYTES)
    sizes = [CHUNK_BYTES] * full
    stored = rest + _HEADER_BYTES
    step = 1 << max(0, stored.bit_length() - 3)  # between this size class and the next
    over = stored % step
    if over and rest >= _CUT_FROM_BYTES and step - over > rest * _MOST_WASTE:
        return [*sizes, rest - over, over]
    return [*sizes, rest] if rest or not sizes else sizes


def cut(data: bytes) -> list[memoryview]:
    """The chunks of a payload, not copied; at least one."""
    view, start, parts = memoryview(data), 0, []
    for size in chunk_sizes(len(data)):
        parts.append(view[start : start + size])
        start += size
    return parts


T = TypeVar("T")

UNPINNED_S = 3600
"""How long bytes live that no script has pinned."""

ROUND_BYTES = 8 * 2**20
"""At most so much in one round trip: larger ones stall the server for everybody (measured)."""

READ_BYTES = 4 * 2**20
"""The same for what is read and used while the next is received; below it numpy does not ask for
large pages.
"""


class Upload(NamedTuple):
    """The bytes of one claim, on their way."""

    gid: str
    token: str
    data: bytes


def checksum(data: bytes | memoryview) -> str:
    """CRC-32 as 8 hex digits: that of zlib, ten times as fast (measured)."""
    # not xxh3: no faster than this (3.3 us for a group, 2.4 here), and readers in other languages
    # have CRC-32
    return f"{isal_zlib.crc32(data):08x}"


class PayloadStore:
    """Reads and writes payloads of one run."""

    def __init__(self, store: Store, keys: Keys, compression: Compression = "none") -> None:
        self._store = store
        self._keys = keys
        self._compression = compression

    def commands(self, gid: str, token: str, data: bytes) -> tuple[PayloadRef, list[Command]]:
        """What stores the bytes of one claim, for a round trip of the caller's."""
        data = compress(data, self._compression)
        parts = cut(data)
        names = self._keys.payload_chunks(gid, token, len(parts))
        return PayloadRef(gid, token, len(parts), len(data), checksum(data)), _sets(
            zip(names, parts, strict=True)
        )

    def write(self, gid: str, token: str, data: bytes) -> PayloadRef:
        """Store the bytes of one claim; they expire unless a submit pins them."""
        return self.write_many([Upload(gid, token, data)])[0]

    def write_many(self, uploads: Sequence[Upload]) -> list[PayloadRef]:
        """Store the bytes of many claims, in round trips of bounded size."""
        chunks: list[tuple[str, memoryview]] = []
        refs = []
        for gid, token, document in uploads:
            data = compress(document, self._compression)
            parts = cut(data)
            chunks += zip(self._keys.payload_chunks(gid, token, len(parts)), parts, strict=True)
            refs.append(PayloadRef(gid, token, len(parts), len(data), checksum(data)))
        for batch in _rounds((len(part), (name, part)) for name, part in chunks):
            self._send("payload write", batch)
        return refs

    def _send(
        self,
        what: str,
        chunks: Iterable[tuple[str, memoryview | bytes]],
        *,
        starts_work: bool = False,
    ) -> None:
        self._store.write(what, _sets(chunks), starts_work=starts_work)

    def write_prompts(self, payloads: dict[str, bytes], *, token: str = "init") -> None:
        """Store INIT payloads by gid. What is already there stays: it never changes until the group
        ends.

        StoreFull at once where the server is full.
        """
        stored = {gid: compress(data, self._compression) for gid, data in payloads.items()}
        if any(len(data) > CHUNK_BYTES for data in stored.values()):
            raise WireError(
                "a prompt does not fit into one chunk", hint=f"at most {CHUNK_BYTES} bytes"
            )
        named = [(self._keys.payload(gid, token), data) for gid, data in stored.items()]
        self._send("prompt write", named, starts_work=True)

    def read(self, ref: PayloadRef) -> bytes | memoryview:
        """The bytes; PayloadMissing when they are gone, WireError when they are not the ones
        submitted.
        """
        return self.read_each([ref], lambda _, data: data)[0]

    def read_each(
        self, refs: Sequence[PayloadRef], use: Callable[[PayloadRef, bytes | memoryview], T]
    ) -> list[T]:
        """What `use` makes of the bytes of each payload, in order, in round trips of bounded size.

        Bytes of one round trip share memory, which is freed with the last of them. While `use`
        works on those of one, the kernel receives those of the next.
        """
        rounds = list(_rounds(((ref.size or CHUNK_BYTES, ref) for ref in refs), READ_BYTES))
        used: list[T] = []
        with _no_collection():
            for batch, found in zip(rounds, self._read_rounds(rounds), strict=True):
                used += [
                    use(ref, join(ref, parts)) for ref, parts in zip(batch, found, strict=True)
                ]
        return used

    def _read_rounds(self, rounds: Sequence[Sequence[PayloadRef]]) -> Iterator[list[Parts]]:
        if len(rounds) < 2:
            yield from map(self._read, rounds)
            return
        with ThreadPoolExecutor(1, "payload-read") as thread:
            coming = self._begin(thread, rounds[0])
            for following in rounds[1:]:
                found = coming.result()
                coming = self._begin(thread, following)
                yield found
            yield coming.result()

    def _begin(self, thread: Executor, refs: Sequence[PayloadRef]) -> Future[list[Parts]]:
        """Let the thread ask, and wait until it did: in the middle of a decode it would not get the
        interpreter.
        """
        asked = Event()
        coming = thread.submit(self._read, refs, asked)
        coming.add_done_callback(lambda _: asked.set())
        asked.wait()
        return coming

    def _read(self, refs: Sequence[PayloadRef], asked: Event | None = None) -> list[Parts]:
        names = [self._keys.payload_chunks(ref.gid, ref.token, ref.chunks) for ref in refs]
        return self._store.read("payload read", names, [ref.size for ref in refs], asked)

    def read_chunks(self, refs: Sequence[PayloadRef]) -> list[list[bytes | None]]:
        """The chunks of many payloads as they are, unchecked; None for one that is gone."""
        # of a payload whose size is not known, each chunk may be as large as it gets
        expected = [(ref.size // ref.chunks or CHUNK_BYTES, ref) for ref in refs]
        names = [
            (size, name)
            for size, ref in expected
            for name in self._keys.payload_chunks(ref.gid, ref.token, ref.chunks)
        ]
        found: list[bytes | None] = []
        for batch in _rounds(names):
            found += self._store.each("payload read", [("GET", name) for name in batch])
        parts = iter(found)
        return [[next(parts) for _ in range(ref.chunks)] for ref in refs]

    def pin(self, refs: Sequence[PayloadRef]) -> bool:
        """Keep the bytes of these from expiring; whether all of them are there, by their sizes."""
        names = [
            name
            for ref in refs
            for name in self._keys.payload_chunks(ref.gid, ref.token, ref.chunks)
        ]
        # first the pin, then the look: what was seen stays
        self._store.each("pin", [("PERSIST", name) for name in names])
        sizes = iter(self._store.each("pin", [("STRLEN", name) for name in names]))
        return all(sum(next(sizes) for _ in range(ref.chunks)) == ref.size for ref in refs)

    def discard(self, refs: Sequence[PayloadRef]) -> None:
        """List bytes as garbage that no record names."""
        if refs:
            entries = [f"{ref.gid} {ref.token} {ref.chunks}" for ref in refs]
            self._store.each("discard", [("SADD", self._keys.garbage, *entries)])

    def collect(self, limit: int = 200) -> int:
        """Free up to `limit` payloads that the scripts listed as garbage. Returns how many there
        were.
        """
        listed = self._keys.garbage
        hold = self._keys.hold
        # the hold is looked at after the choice: what was garbage before a snapshot's hold is not
        # in the snapshot
        entries, is_held = self._store.each(
            "garbage", [("SRANDMEMBER", listed, limit), ("EXISTS", hold)]
        )
        if not entries or is_held:
            return 0
        # first the bytes, then the note: dying between the two only means doing it again
        self._store.each(
            "garbage", [("UNLINK", name) for entry in entries for name in self._chunks(entry)]
        )
        self._store.each("garbage", [("SREM", listed, *entries)])
        return len(entries)

    def _chunks(self, entry: bytes) -> list[str]:
        """The keys of an entry that a script has listed."""
        gid, token, chunks = entry.decode().split(" ")
        return self._keys.payload_chunks(gid, token, int(chunks))


def _sets(chunks: Iterable[tuple[str, memoryview | bytes]]) -> list[Command]:
    # NX: a repeated write must not put a time limit on bytes that a submit has pinned meanwhile
    return [("SET", name, part, "EX", UNPINNED_S, "NX") for name, part in chunks]


def _rounds(sized: Iterable[tuple[int, T]], most: int = ROUND_BYTES) -> Iterator[list[T]]:
    """The items, in batches whose sizes add up to at most `most`; a larger one goes alone."""
    batch: list[T] = []
    total = 0
    for size, item in sized:
        if batch and total + size > most:
            yield batch
            batch, total = [], 0
        batch.append(item)
        total += size
    if batch:
        yield batch


@contextmanager
def _no_collection() -> Iterator[None]:
    """The garbage collector rests: it would look through thousands of new maps again and again, and
    none is garbage.

    That is an eighth of the time of a take (measured), and what msgpack's documentation advises.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def join(ref: PayloadRef, parts: Sequence[bytes | memoryview | None]) -> bytes | memoryview:
    """The whole payload. PayloadMissing where a chunk is gone, WireError where they are not the
    bytes submitted.
    """
    present = [part for part in parts if part is not None]
    if len(present) != len(parts):
        raise PayloadMissing(
            f"group {ref.gid}: {len(parts) - len(present)} of {ref.chunks} chunks are gone"
        )
    data = present[0] if len(present) == 1 else b"".join(present)
    if ref.size and len(data) != ref.size:
        raise WireError(f"group {ref.gid}: {len(data)} bytes, {ref.size} were submitted")
    if ref.crc and checksum(data) != ref.crc:
        raise WireError(f"group {ref.gid}: checksum {checksum(data)}, {ref.crc} was submitted")
    return data


PIN = 200
"""Payloads that one round pins."""

PROMPT = "-prompt"
"""Ends the token of a prompt that came with a group from outside: it becomes the group's `init`."""


def pin_listed(store: Store, keys: Keys) -> int:
    """Keep listed payloads from expiring; returns how many there were. More may be left if it is
    PIN.
    """
    if not keys.spread:
        return 0
    (found,) = store.each("pin", [("SRANDMEMBER", keys.unpinned, PIN)])
    if not found:
        return 0
    parts = [entry.decode().split(" ") for entry in found]
    commands: list[Command] = []
    for gid, token, chunks in parts:
        commands += [("PERSIST", name) for name in keys.payload_chunks(gid, token, int(chunks))]
    _name_prompts(store, keys, [(gid, token) for gid, token, _ in parts if token.endswith(PROMPT)])
    store.each("pin", commands, on_payloads=True)
    store.each("pin", [("SREM", keys.unpinned, *found)])
    return len(found)


def _name_prompts(store: Store, keys: Keys, prompts: list[tuple[str, str]]) -> None:
    """Give prompts the name under which their groups look for them, as the script does where it
    may.
    """
    copies = [
        ("COPY", keys.payload(gid, token), keys.payload(gid, "init")) for gid, token in prompts
    ]
    store.each("pin", copies, on_payloads=True)
    found = store.each("pin", [("EXISTS", keys.group(gid)) for gid, _ in prompts])
    # of a group that has ended meanwhile, the copy expires as what it was made from does
    living = [gid for (gid, _), is_there in zip(prompts, found, strict=True) if is_there]
    store.each("pin", [("PERSIST", keys.payload(gid, "init")) for gid in living], on_payloads=True)
    store.each("pin", [("UNLINK", keys.payload(gid, token)) for gid, token in prompts])
