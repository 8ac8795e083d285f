"""Payload bytes: written and read outside scripts, under keys with the writer's token.

A fenced worker can never overwrite the bytes of its successor (I2). Bytes are written with an
expiry, which the script that accepts them removes. Scripts list unneeded payloads in `garbage`; any
process may run `collect` to free them, at the same time as others, and may die at any point.
"""

from __future__ import annotations

import gc
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from isal import isal_zlib

from buffer.errors import PayloadMissing, WireError
from buffer.job import PayloadRef
from buffer.redis.bounds import BYTES_PER_TRIP, BYTES_PER_VALUE
from buffer.redis.bulk_io import Pieces
from buffer.redis.keys import Keys
from buffer.redis.store import Store
from buffer.wire.framing import Compression, compress

T = TypeVar("T")

PROMPT = "-prompt"  # ends the token of an imported prompt, which becomes its group's `init`

_MOST_WASTE = 1 / 16  # share of a payload that may be wasted; above it, cut once more

_AHEAD = 2  # round trips under way while another one's values are used: the server never waits

Whole = bytes | memoryview  # of one payload

SetCommand = tuple[str, str, Pieces, str, int, str]


def checksum(*pieces: bytes | memoryview, known: str = "") -> str:
    """Return the CRC-32 of zlib of all bytes as 8 hex digits, ten times as fast (measured).

    `known`: that of the bytes before.
    """
    # not xxh3: it is no faster (3.3 us for a group, 2.4 here), and CRC-32 exists in all languages
    crc = int(known or "0", 16)
    for piece in pieces:
        crc = isal_zlib.crc32(piece, crc)
    return f"{crc:08x}"


class PayloadStore:
    def __init__(self, store: Store, keys: Keys, compression: Compression = "none") -> None:
        self._store = store
        self._keys = keys
        self._compression = compression
        self._threads = ThreadPoolExecutor(_AHEAD, "payload-read")

    def commands(self, gid: str, token: str, data: Pieces) -> tuple[PayloadRef, list[SetCommand]]:
        """Return the reference of the bytes of one claim, and commands that store them uncopied."""
        return self.append(PayloadRef(gid, token, 0, 0, ""), self.compressed(data))

    def compressed(self, data: Pieces) -> Pieces:
        """Return a document as it is stored: compressed, if the run does that."""
        return (
            data if self._compression == "none" else [compress(b"".join(data), self._compression)]
        )

    def append(self, ref: PayloadRef, data: Pieces) -> tuple[PayloadRef, list[SetCommand]]:
        """Return the reference with more bytes behind it, and the commands that store these."""
        parts = cut(data, self._store.servers.has_size_classes)
        chunks = ref.chunks + len(parts)
        names = self._keys.payload_chunks(ref.gid, ref.token, chunks)[ref.chunks :]
        size = ref.size + sum(map(len, data))
        longer = PayloadRef(ref.gid, ref.token, chunks, size, checksum(*data, known=ref.crc))
        return longer, [_set(name, part) for name, part in zip(names, parts, strict=True)]

    def write(self, gid: str, token: str, data: bytes) -> PayloadRef:
        """Store the bytes of one claim; they expire unless a submit accepts them."""
        ref, commands = self.commands(gid, token, [data])
        for batch in by_size((sum(map(len, command[2])), command) for command in commands):
            self._store.send("payload write", batch)
        return ref

    def write_prompts(self, payloads: dict[str, bytes], *, token: str = "init") -> None:
        """Store INIT payloads by gid. Existing ones stay: they never change until the group ends.

        Raises StoreFull at once where the server is full, WireError for a prompt that is too large.
        """
        stored = {gid: compress(data, self._compression) for gid, data in payloads.items()}
        for gid, data in stored.items():
            if len(data) > BYTES_PER_VALUE:
                raise WireError(
                    f"the prompt of {gid} has {len(data)} bytes",
                    hint=f"at most {BYTES_PER_VALUE} can be stored",
                )
        commands = [_set(self._keys.payload(gid, token), [data]) for gid, data in stored.items()]
        self._store.send("prompt write", commands, starts_work=True)

    def fits(self, prompt: bytes) -> bool:
        is_short = len(prompt) <= BYTES_PER_VALUE
        return is_short or len(compress(prompt, self._compression)) <= BYTES_PER_VALUE

    def read(self, ref: PayloadRef) -> bytes | memoryview:
        """Return the bytes. Raises what `join` raises."""
        return self.read_each([ref], lambda _, found: found)[0]

    def read_each(
        self,
        refs: Sequence[PayloadRef],
        use: Callable[[Sequence[PayloadRef], Sequence[Whole]], Sequence[T]],
    ) -> list[T]:
        """Return what `use` makes of the payloads of each round trip, in order.

        The payloads of a round trip share memory. The next two are under way while `use` works.
        """
        rounds = list(by_size((ref.size or BYTES_PER_VALUE, ref) for ref in refs))
        # malloc keeps no more for the next read: that gets pages of its own
        own_pages = sum(ref.size for ref in refs) >= 128 * 2**20

        def read(batch: Sequence[PayloadRef]) -> list[Whole]:
            entries = [(self._names(ref), ref.size) for ref in batch]
            found = self._store.read("payload read", entries, own_pages=own_pages)
            return list(map(join, batch, found))

        used: list[T] = []
        # scanning new maps takes an eighth of a take (measured)
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            if len(rounds) == 1:
                return list(use(refs, read(refs)))
            coming = deque(self._threads.submit(read, batch) for batch in rounds[:_AHEAD])
            for n, batch in enumerate(rounds, _AHEAD):
                found = coming.popleft().result()
                coming.extend(self._threads.submit(read, after) for after in rounds[n : n + 1])
                used += use(batch, found)
            return used
        finally:
            if was_enabled:
                gc.enable()

    def _names(self, ref: PayloadRef) -> list[str]:
        return self._keys.payload_chunks(ref.gid, ref.token, ref.chunks)

    def pin(self, refs: Sequence[PayloadRef]) -> bool:
        """Remove the expiry of payloads, and return whether all of their bytes are there."""
        names = [name for ref in refs for name in self._names(ref)]
        # in this order, so that bytes that were found cannot expire any more
        self._store.send("pin", [("PERSIST", name) for name in names])
        sizes = iter(self._store.send("pin", [("STRLEN", name) for name in names]))
        return all(sum(next(sizes) for _ in range(ref.chunks)) == ref.size for ref in refs)

    def discard(self, refs: Sequence[PayloadRef]) -> None:
        """List payloads that no record names as garbage."""
        if refs:
            entries = [f"{ref.gid} {ref.token} {ref.chunks}" for ref in refs]
            self._store.send("discard", [("SADD", self._keys.garbage, *entries)])

    def collect(self, limit: int = 200) -> int:
        """Free up to `limit` payloads that are listed as garbage, and return their number."""
        listed = self._keys.garbage
        entries = self._store.ask("garbage", "SRANDMEMBER", listed, limit)
        if not entries:
            return 0
        names: list[str] = []
        for entry in entries:
            # another entry is not from a script
            if match := re.fullmatch(r"(\S+) (\S+) (\d{1,4})", entry.decode(errors="replace")):
                names += self._keys.payload_chunks(match[1], match[2], int(match[3]))
        # bytes first, entries second: a process that dies in between leaves entries to repeat
        self._store.send("garbage", [("UNLINK", name) for name in names])
        self._store.send("garbage", [("SREM", listed, *entries)])
        return len(entries)


def _set(name: str, part: Pieces) -> SetCommand:
    # the bytes stay for an hour, unless a script accepts them; NX: a repeated write must not set an
    # expiry on bytes that a script has accepted meanwhile
    return ("SET", name, part, "EX", 3600, "NX")


def by_size(sized: Iterable[tuple[int, T]]) -> Iterator[list[T]]:
    """Yield the items in batches for one round trip each; a larger item is a batch of its own."""
    batch: list[T] = []
    total = 0
    for size, item in sized:
        if batch and total + size > BYTES_PER_TRIP:
            yield batch
            batch, total = [], 0
        batch.append(item)
        total += size
    if batch:
        yield batch


def chunk_sizes(size: int, by_class: bool) -> list[int]:
    """Return the bytes of each chunk of a payload; readers accept any other cut.

    `by_class`: for jemalloc, which has four size classes per doubling: 165,888 bytes in one value
    occupy 196,608. Cut at the largest class that fits, they occupy 163,840 and 2,560. A third chunk
    would save little: the second is less than a fifth of the whole, and wastes at most a fifth of
    that. Elsewhere, a second chunk would only cost time.
    """
    full, rest = divmod(size, BYTES_PER_VALUE)
    sizes = [BYTES_PER_VALUE] * full
    if by_class and rest >= 8192:  # below it, a second key costs more than it saves
        stored = rest + 16  # more than Redis puts around a string in the same allocation (10)
        step = 1 << (stored.bit_length() - 3)  # between this size class and the next
        over = stored % step
        if over and step - over > rest * _MOST_WASTE:
            return [*sizes, rest - over, over]
    return [*sizes, rest] if rest or not sizes else sizes


def cut(data: Pieces, by_class: bool) -> list[Pieces]:
    """Return the chunks of a payload, at least one, without copying them."""
    sizes = chunk_sizes(sum(map(len, data)), by_class)
    if len(sizes) == 1:
        return [data]
    rest = [memoryview(piece) for piece in reversed(data)]
    chunks: list[Pieces] = []
    for size in sizes:
        chunk: Pieces = []
        while size:
            piece = rest.pop()
            if len(piece) > size:
                rest.append(piece[size:])
                piece = piece[:size]
            chunk.append(piece)
            size -= len(piece)
        chunks.append(chunk)
    return chunks


def join(ref: PayloadRef, parts: Sequence[Whole | None]) -> Whole:
    """Return the payload. Raises PayloadMissing for a lost chunk, WireError for other bytes."""
    present = [part for part in parts if part is not None]
    if len(present) != len(parts):
        raise PayloadMissing(
            f"group {ref.gid}: {len(parts) - len(present)} of {ref.chunks} chunks are gone"
        )
    data = present[0] if len(present) == 1 else b"".join(present)
    if ref.size and len(data) != ref.size:
        raise WireError(f"group {ref.gid}: {len(data)} bytes, {ref.size} were submitted")
    if ref.crc and (found := checksum(data)) != ref.crc:
        raise WireError(f"group {ref.gid}: checksum {found}, {ref.crc} was submitted")
    return data
