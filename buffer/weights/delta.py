"""A version of weights as the changes to the one before: RL changes a few percent of bf16 a step.

A folder of changes has every file of the whole version, but safetensors files as NAME.delta, and

    delta.json    base: address and checksum of the version that was changed
                  whole: the files that result, with their checksums (folder_manifest.py)

Its reader applies the changes to the base, which it has or fetches, and uses only a result with the
checksums of the whole version. A delta treats a file as words of 16 bits: it holds the position of
each changed word, as a distance within blocks of 65,536 words, and the difference modulo 65,536.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import numpy as np
import orjson
from isal import isal_zlib
from isal.igzip_lib import IsalError
from numpy.typing import NDArray

from buffer.errors import WireError
from buffer.weights import folder_manifest as manifest
from buffer.weights.checksums import (
    THREADS,
    FileChecksums,
    WrittenFiles,
    check_file,
    starts_of,
    write_at,
)
from buffer.weights.transport import PublishedWeights, Save, WeightsSender
from buffer.wire.rollout import PolicyVersion

log = logging.getLogger("rolloutmq.trainer")

NAME = "delta.json"
SUFFIX = ".delta"

BLOCK_WORDS = 1 << 16
CHUNK_WORDS = 1 << 23  # words that a thread compares at once: 16 MiB of each version

PREFIX = ".base-"

LEVEL = 1  # of deflate: level 3 is 4 % smaller, and takes three times as long


def is_delta(folder: Path) -> bool:
    return (folder / NAME).is_file()


def write(folder: Path, whole: Path, base: Path, published: PublishedWeights) -> int:
    """Write the changes from `base` (at `published`) to `whole` into `folder`; return the bytes."""
    listed = manifest.files_of((whole / manifest.NAME).read_bytes())
    for name, facts in listed.items():
        old = base / name
        is_changed = name.endswith(".safetensors") and facts.bytes % 2 == 0
        if is_changed and old.is_file() and old.stat().st_size == facts.bytes:
            _write_changes(folder / (name + SUFFIX), old, whole / name, facts.bytes // 2)
        else:
            shutil.copyfile(whole / name, folder / name)
    files = {name: facts.to_json() for name, facts in listed.items()}
    description = {"base": published._asdict(), "whole": files}
    (folder / NAME).write_bytes(orjson.dumps(description))
    return sum(file.stat().st_size for file in folder.iterdir())


def base_of(folder: Path) -> PublishedWeights:
    """Return where the version is to which a folder of changes applies. Raises WireError."""
    base = _description(folder)["base"]
    try:
        return PublishedWeights(str(base["address"]), str(base["checksum"]))
    except (KeyError, TypeError) as error:
        raise WireError(f"{folder / NAME} names no base: {error!r}") from error


def apply(folder: Path, base: Path, result: Path) -> None:
    """Write the version of `base` and the changes into the empty `result`. Raises WireError."""
    listed: Mapping[str, Any] = _description(folder).get("whole", {})
    for name in listed:
        changes = folder / (name + SUFFIX)
        if Path(name).name != name:
            raise WireError(f"{folder / NAME} has an invalid file name: {name!r}")
        if changes.is_file():
            _apply_changes(changes, base / name, result / name)
        else:
            shutil.copyfile(folder / name, result / name)
    check(folder, result)


def check(folder: Path, result: Path) -> None:
    """Raise WireError or OSError unless `result` is what the changes in `folder` must make."""
    for name, facts in _description(folder).get("whole", {}).items():
        check_file(result / name, FileChecksums.parse(facts))


def _description(folder: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = orjson.loads((folder / NAME).read_bytes())
    except ValueError as error:
        raise WireError(f"{folder / NAME} is no description of changes: {error}") from error
    return found


def _write_changes(file: Path, old: Path, new: Path, words: int) -> None:
    """Write an index, lines of (changed words, bytes of their chunk), and the chunks."""
    starts = range(0, words, CHUNK_WORDS)
    with ThreadPoolExecutor(THREADS) as pool:
        chunks = list(pool.map(lambda start: _pack(_words(old, start), _words(new, start)), starts))
    index = orjson.dumps({"words": words, "chunks": [[n, len(data)] for n, data in chunks]})
    with file.open("xb") as stream:
        stream.write(len(index).to_bytes(8, "little") + index)
        stream.writelines(data for _, data in chunks)


def _apply_changes(changes: Path, base: Path, result: Path) -> None:
    with changes.open("rb") as stream:
        words, chunks = _index(stream)
        first = stream.tell()
    if base.stat().st_size != 2 * words:
        raise WireError(f"{base} is not the file to which {changes.name} applies")
    offsets = starts_of([size for _, size in chunks])
    with changes.open("rb") as stream, result.open("xb") as out:

        def apply_chunk(number: int) -> None:
            count, size = chunks[number]
            data = os.pread(stream.fileno(), size, first + offsets[number])
            start = number * CHUNK_WORDS
            changed = _unpack(_words(base, start), count, data)
            write_at(out.fileno(), 2 * start, changed.data.cast("B"))

        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(apply_chunk, range(len(chunks))))


def _index(stream: IO[bytes]) -> tuple[int, list[tuple[int, int]]]:
    """Return all words, and of each chunk how many are changed, and its bytes."""
    try:
        size = int.from_bytes(stream.read(8), "little")
        found = orjson.loads(stream.read(min(size, 1 << 26)))  # `size` may be damaged
        return int(found["words"]), [(int(count), int(size)) for count, size in found["chunks"]]
    except (ValueError, KeyError, TypeError) as error:
        raise WireError(f"not a file of changes: {error!r}") from error


def _words(file: Path, start: int) -> NDArray[np.uint16]:
    return np.fromfile(file, "<u2", CHUNK_WORDS, offset=2 * start)


def _pack(old: NDArray[np.uint16], new: NDArray[np.uint16]) -> tuple[int, bytes]:
    """Return the number of changed words, and the bytes that `_unpack` reads.

    Compressed: changed words per block (uint32), then columns of bytes: distance from the position
    before and difference, each low bytes before high bytes.
    """
    changed = np.flatnonzero(old != new)
    counts = np.bincount(changed >> 16, minlength=-(-len(new) // BLOCK_WORDS)).astype("<u4")
    steps = np.diff(changed.astype(np.uint16), prepend=np.uint16(0))  # modulo 65,536
    columns = (steps.astype("<u2"), (new[changed] - old[changed]).astype("<u2"))
    planes = [column.view(np.uint8).reshape(-1, 2).T.tobytes() for column in columns]
    return len(changed), isal_zlib.compress(counts.tobytes() + b"".join(planes), LEVEL)


def _unpack(base: NDArray[np.uint16], count: int, data: bytes) -> NDArray[np.uint16]:
    """Return the changed words; `base` is changed in place. Raises WireError."""
    blocks = -(-len(base) // BLOCK_WORDS)
    try:
        raw = np.frombuffer(isal_zlib.decompress(data), np.uint8)
    except IsalError as error:  # type: ignore[misc]  # typed as an instance
        raise WireError(f"a chunk of changed weights cannot be read: {error}") from error
    if len(raw) != 4 * blocks + 4 * count:
        raise WireError("a chunk of changed weights has another size than its index says")
    counts = raw[: 4 * blocks].view("<u4")
    steps, added = (
        plane.reshape(2, -1).T.copy().view("<u2").ravel()
        for plane in np.split(raw[4 * blocks :], 2)
    )
    places = np.cumsum(steps, dtype=np.uint16)
    starts = np.repeat(np.arange(blocks, dtype=np.int64) * BLOCK_WORDS, counts)
    if len(starts) != count or (count and starts[-1] + places[-1] >= len(base)):
        raise WireError("a chunk of changed weights writes past the end of its tensor")
    base[starts + places] += added
    return base


class DeltaSender:
    """Publishes versions as changes where these are smaller, over a transport of folders.

    The first version after a start and every `delta_base_every`-th one are whole, and one that is
    written again, since it may not be made of itself; `folder` keeps the last version whole.
    """

    def __init__(self, transport: WeightsSender, folder: Path, delta_base_every: int) -> None:
        self._transport = transport
        self._folder = folder
        self._delta_base_every = delta_base_every
        self._base: tuple[Path, PublishedWeights] | None = None
        self._chain: list[PolicyVersion] = []  # since the newest whole one, with that

    def write(self, weights: PolicyVersion, save: Save) -> PublishedWeights:
        label = str(weights)
        whole = self._folder / (PREFIX + label.replace(":", "-"))
        shutil.rmtree(whole, ignore_errors=True)
        whole.mkdir(parents=True)
        manifest.write(whole, label, saved=save(whole))
        if weights in self._chain:
            self._chain.clear()
        published = self._transport.write(weights, lambda folder: self._fill(folder, whole))
        self._chain.append(weights)
        if self._base and self._base[0] != whole:
            shutil.rmtree(self._base[0], ignore_errors=True)
        self._base = (whole, published)
        return published

    def _fill(self, folder: Path, whole: Path) -> WrittenFiles:
        size = sum(file.stat().st_size for file in whole.iterdir())
        if self._base and 0 < len(self._chain) < self._delta_base_every:
            written = write(folder, whole, *self._base)
            log.info("weights as changes", extra={"bytes": written, "whole_bytes": size})
            if written <= 0.5 * size:  # else a chain is not worth it
                return WrittenFiles()
            for file in folder.iterdir():
                file.unlink()
        self._chain.clear()
        known = manifest.files_of((whole / manifest.NAME).read_bytes())
        for name in known:
            try:
                os.link(whole / name, folder / name)  # a second name of the file
            except OSError:  # the file system cannot
                shutil.copyfile(whole / name, folder / name)
        return WrittenFiles(known)

    def prune(self) -> None:
        self._transport.prune()

    def clear(self) -> None:
        """Delete what a trainer left that was killed while it wrote."""
        for folder in self._folder.glob(f"{PREFIX}*"):
            shutil.rmtree(folder, ignore_errors=True)
        self._transport.clear()

    def close(self) -> None:
        if self._base:
            shutil.rmtree(self._base[0], ignore_errors=True)
        self._transport.close()
