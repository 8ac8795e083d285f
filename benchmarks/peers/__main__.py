"""`make bench-peers`: measure, compare what was taken with what was put, and write the results."""

from __future__ import annotations

import gc
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import count, islice
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from benchmarks import sample
from benchmarks.bench_run import TASK
from benchmarks.figure import Figure, Spent
from benchmarks.machine import machine_facts
from benchmarks.peers.other_peers import RaggedTransferQueue, RayQueue, SkyRL, TransferQueue
from benchmarks.peers.peer import Peer, rows
from benchmarks.peers.redis_peers import Ours, Plain, Stream
from benchmarks.peers.table import KINDS, figures_of, table, write_table
from benchmarks.report import print_table, read_json, write_json
from benchmarks.server import durable_server, memory_server, used_by
from buffer.wire.group import RolloutGroup

BENCHMARKS = Path(__file__).parent.parent
RESULTS = BENCHMARKS / "results" / "peers.json"


class Size(NamedTuple):
    """A measured size: groups of a round, and groups of a call."""

    name: str
    shape: sample.Shape
    groups: int
    a_call: int


SIZES = (
    Size("166 KB, 128 a call", sample.FULL, 128, 128),
    Size("166 KB, one by one", sample.FULL, 16, 1),
    Size("2.4 MB, 8 a call", sample.Shape(8, 512, 32_768), 8, 8),
)

SLOW = 8
"""A slow queue gets so much less in a round."""


def main(
    rounds: Annotated[int, typer.Option(help="rounds that count; one before them does not")] = 5,
    tables: Annotated[
        bool, typer.Option("--tables", help="measure nothing: write the table again")
    ] = False,
) -> None:
    """Compare put and take with other queues, by processor time of client and servers."""
    if tables:
        figures, facts = read_json(RESULTS)
    else:
        figures, facts = list(measured(rounds)), machine_facts()
        write_json(figures, facts, RESULTS)
    print_table([figure for figure in figures if figure.target is not None])
    typer.echo("\n".join(table(figures)))
    write_table(figures, facts, BENCHMARKS / "README.md")


def measured(rounds: int, sizes: Sequence[Size] = SIZES) -> Iterator[Figure]:
    """Yield the figures of every queue that can be started here, size by size."""
    with ExitStack() as stack:
        peers = list(_started(stack))
        # what all these packages have made until here is not collected on anybody's time
        gc.collect()
        gc.freeze()
        stack.callback(gc.unfreeze)
        draws = count()
        for size in sizes:
            spent = {kind: Spent(defaultdict(list), defaultdict(list)) for kind in KINDS}
            for number in range(rounds + 1):
                gids = [f"{TASK}-{draw:010d}" for draw in islice(draws, size.groups)]
                groups = [sample.group(gid, size.shape) for gid in gids]
                for peer in peers:
                    some = groups[: max(1, len(groups) // SLOW)] if peer.slow else groups
                    clocks = put_and_take(
                        peer, [some[n : n + size.a_call] for n in range(0, len(some), size.a_call)]
                    )
                    for kind, clock in clocks.items() if number else ():
                        spent[kind].wall[peer.name].append(clock.wall / len(some))
                        spent[kind].cpu[peer.name].append(clock.cpu / len(some))
            typer.echo(f"measured: {size.name}", err=True)
            yield from figures_of(size.name, peers, spent)


def _started(stack: ExitStack) -> Iterator[Peer]:
    """Yield the queues that could be started, and say why another could not."""
    for server in (memory_server, durable_server):
        started = stack.enter_context(server())
        yield Ours(started)
        yield Plain(started)
        if server is memory_server:
            yield Stream(started)
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    others: dict[str, Callable[[], Peer]] = {
        TransferQueue.name: TransferQueue,
        RaggedTransferQueue.name: RaggedTransferQueue,
        RayQueue.name: RayQueue,
        SkyRL.name: lambda: SkyRL(folder),
    }
    for name, start in others.items():
        try:
            yield start()
        except Exception as error:  # whatever a package of others raises: the rest goes on
            typer.echo(f"{name} is left out: {type(error).__name__}: {error}", err=True)


class _Clock:
    """Sum up the time of some blocks: on the clock, and of this process and a queue's servers."""

    def __init__(self, servers: Sequence[int]) -> None:
        self._servers = servers
        self.wall = self.cpu = 0.0

    def __enter__(self) -> None:
        self.cpu -= self._served()
        self.cpu -= time.process_time()
        self.wall -= time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.wall += time.perf_counter()
        self.cpu += time.process_time()
        self.cpu += self._served()

    def _served(self) -> float:
        return sum(map(used_by, self._servers))


def put_and_take(peer: Peer, chunks: Sequence[list[RolloutGroup]]) -> dict[str, _Clock]:
    """Put and take each chunk; raise unless every number comes out as it went in."""
    clocks = {kind: _Clock(peer.servers) for kind in KINDS}
    for groups in chunks:
        chunk = peer.prepare(groups)
        with clocks["put"]:
            peer.put(chunk)
        with clocks["take"]:
            taken = peer.take(chunk)
        wanted = (row for group in groups for row in rows(group))
        pairs = zip(wanted, peer.rows(taken), strict=True)
        if not all(put.equals(got) for put, got in pairs):
            raise AssertionError(f"{peer.name} returned other values than were put")
        peer.forget(chunk)
    return clocks


if __name__ == "__main__":
    typer.run(main)
