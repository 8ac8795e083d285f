"""List the benchmarks and their sizes: the full suite takes minutes, the quick one seconds."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from benchmarks.archive import archive
from benchmarks.codec import codec, pack
from benchmarks.engine import engine
from benchmarks.figure import Figure
from benchmarks.idle import idle
from benchmarks.memory import memory
from benchmarks.pause import pause
from benchmarks.scale import scale
from benchmarks.scaling import scaling
from benchmarks.scan_buffer import scan
from benchmarks.server import BenchServer, durable_server, memory_server
from benchmarks.stragglers import stragglers
from benchmarks.throughput import put, take
from benchmarks.token_rows import token_rows
from benchmarks.weights import weights


@dataclass(frozen=True, slots=True)
class Size:
    """How much of everything. `groups`: of 165,888 bytes."""

    groups: int
    rounds: int
    pools: tuple[int, ...]
    index_groups: int
    scanned: int
    steps: int
    """train steps of each simulated run"""
    ages: tuple[int, ...]
    """max_staleness of the simulated runs"""
    pauses: int
    paused_workers: int
    crowds: tuple[int, ...]
    """workers that cost the server"""
    archived: tuple[int, int]
    """groups in an archived batch, of 166 KB and of 2.6 MB"""
    engine_groups: int
    engine_rounds: int
    """0: no vLLM engine is started"""


FULL = Size(
    groups=512,
    rounds=5,
    pools=(1000, 10_000, 100_000, 1_000_000),
    index_groups=10_000,
    scanned=100_000,
    steps=6,
    ages=(1, 4),
    pauses=150,
    paused_workers=64,
    crowds=(1, 10, 100, 1000, 5000),
    archived=(64, 32),
    engine_groups=64,
    engine_rounds=3,
)
QUICK = Size(
    groups=64,
    rounds=3,
    pools=(1000, 20_000),
    index_groups=1000,
    scanned=10_000,
    steps=3,
    ages=(1,),
    pauses=10,
    paused_workers=64,
    crowds=(1, 30, 100),
    archived=(64, 8),
    engine_groups=48,
    engine_rounds=2,
)
TINY = Size(
    groups=8,
    rounds=1,
    pools=(600, 1200),
    index_groups=64,
    scanned=600,
    steps=1,
    ages=(),
    pauses=2,
    paused_workers=2,
    crowds=(1, 2),
    archived=(1, 1),
    engine_groups=1,
    engine_rounds=0,
)
"""Only shows that everything runs; its figures mean nothing."""


def _put(server: BenchServer, size: Size) -> Iterator[Figure]:
    # a batch at a time: a durable server writes every round to disk
    return put(server, min(size.groups, 128), size.rounds)


def _take(server: BenchServer, size: Size) -> Iterator[Figure]:
    return take(server, size.groups, size.rounds)


def _codec(_: BenchServer, size: Size) -> Iterator[Figure]:
    return codec(size.rounds)


def _pack(server: BenchServer, size: Size) -> Iterator[Figure]:
    return pack(server, size.groups, size.rounds)


def _scaling(server: BenchServer, size: Size) -> Iterator[Figure]:
    return scaling(server, size.pools, 3 * size.rounds)


def _memory(server: BenchServer, size: Size) -> Iterator[Figure]:
    return memory(server, size.index_groups)


def _idle(server: BenchServer, size: Size) -> Iterator[Figure]:
    return idle(server, size.steps, size.ages)


def _stragglers(_: BenchServer, size: Size) -> Iterator[Figure]:
    return stragglers(8 * size.steps, (1, 2, 4, 8) if size.steps > 1 else (1,))


def _tokens(server: BenchServer, size: Size) -> Iterator[Figure]:
    return token_rows(server, 2 * size.steps, (0, 1, 2, 4, 8) if size.steps > 1 else (0,))


def _archive(server: BenchServer, size: Size) -> Iterator[Figure]:
    return archive(server, size.archived, size.rounds)


def _pause(server: BenchServer, size: Size) -> Iterator[Figure]:
    return pause(server, size.pauses, size.paused_workers)


def _scale(server: BenchServer, size: Size) -> Iterator[Figure]:
    return scale(server, size.crowds)


def _engine(server: BenchServer, size: Size) -> Iterator[Figure]:
    return engine(server, size.engine_groups, size.engine_rounds)


def _weights(server: BenchServer, size: Size) -> Iterator[Figure]:
    return weights(server, size.engine_rounds)


SUITE: dict[str, Callable[[BenchServer, Size], Iterator[Figure]]] = {
    "put": _put,
    "take": _take,
    "codec": _codec,
    "pack": _pack,
    "memory": _memory,
    "scaling": _scaling,
    "scale": _scale,
    "pause": _pause,
    "idle": _idle,
    "stragglers": _stragglers,
    "tokens": _tokens,
    "archive": _archive,
    "engine": _engine,
    "weights": _weights,
}
IN_MEMORY_ONLY = {"scaling", "memory", "codec", "stragglers"}
DURABLE_ONLY = {"idle", "tokens", "archive", "engine", "weights"}


def run_suite(names: list[str], size: Size) -> Iterator[Figure]:
    """Run the named benchmarks in memory, and on a durable server where it matters."""
    for make_server, others in ((memory_server, DURABLE_ONLY), (durable_server, IN_MEMORY_ONLY)):
        if chosen := [name for name in names if name not in others]:
            with make_server() as server:
                for name in chosen:
                    yield from SUITE[name](server, size)
    redis = shutil.which("redis-server")
    if "memory" in names and redis:
        with memory_server(redis) as server:
            yield from _memory(server, size)
    if "scaling" in names:
        yield from scan(size.scanned, 3)
