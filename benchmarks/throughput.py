"""put and take of whole groups, in parts of what plain SET and MGET of the same bytes reach.

Processor time is that of the client and the server together.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import Any

from benchmarks import pickled_stream, sample
from benchmarks.bench_run import TASK, BenchRun
from benchmarks.figure import Figure, Spent, Way, interleave, per_second, ratio
from benchmarks.server import BenchServer
from buffer.job import Job
from buffer.wire import group_bytes
from buffer.wire.group import RolloutGroup
from consumer.handle.rollout_consumer import RolloutConsumer

PUT_TARGET = {"in memory": 0.4, "durable": 0.65}
TAKE_TARGET = 0.65
STREAM_TARGETS = {"put": 4.0, "take": 9.0}
STREAM = pickled_stream.NAME
DEPTHS = (1, 8, 16, 48, 512)
"""Values in one pipeline or one MGET; the best of them is what ours is compared with."""


def put(server: BenchServer, groups: int, rounds: int) -> Iterator[Figure]:
    """Measure the path from a group in memory to a group in the pool, against SET of its bytes.

    "ours" submits what has piled up in one round trip, as a busy worker does; "ours, single"
    submits one group at a time, and is compared with "SET, single".
    """
    finished = [sample.group(f"{TASK}-{draw:010d}") for draw in range(groups)]
    encoded = [group_bytes.encode(group) for group in finished]

    def claimed() -> tuple[BenchRun, list[Job]]:
        run = BenchRun(server)
        return run, run.claim(groups)

    def submit(prepared: tuple[BenchRun, list[Job]]) -> None:
        prepared[0].submit(prepared[1], finished)

    def submit_singly(prepared: tuple[BenchRun, list[Job]]) -> None:
        prepared[0].submit_singly(prepared[1], finished)

    def raw_set(depth: int) -> Way:
        return Way(lambda _: _set(server.raw, encoded, depth), clean=server.clear)

    ways = {
        "ours": Way(submit, claimed, server.clear),
        "ours, single": Way(submit_singly, claimed, server.clear),
    }
    ways["SET, single"] = Way(lambda _: _set_singly(server.raw, encoded), clean=server.clear)
    ways |= {f"SET x {depth}": raw_set(depth) for depth in DEPTHS if depth <= groups}
    lists = [pickled_stream.as_lists(group) for group in finished]
    ways[STREAM] = Way(lambda _: pickled_stream.add(server.raw, lists), clean=server.clear)
    section = f"put, {server.name}"
    spent = interleave(ways, rounds, server.processor_time)
    yield from _figures(section, spent, groups, "SET x", PUT_TARGET[server.name])
    yield from _compared(section, spent, "ours, single", "SET, single", None)


def take(server: BenchServer, groups: int, rounds: int) -> Iterator[Figure]:
    """Measure the path from a request to checked numpy columns, against MGET of the same bytes."""
    run = BenchRun(server)
    run.make_ready(groups)
    run.check()
    # a prefetcher would read what is measured before the clock runs
    consumer = RolloutConsumer(run.run, prefetch_bytes=0, nonce=run.trainer)

    def raw_get(names: list[str], depth: int) -> Way:
        return Way(lambda _: _mget(server.raw, names, depth))

    def take_batch(_: Any) -> list[RolloutGroup]:
        return consumer.take_batch(1, {TASK: groups}).groups

    ways = {"ours": Way(take_batch, clean=lambda: run.undo_take(1))}
    names = [
        key.decode() for key in server.raw.scan_iter(f"{run.keys.prefix}payload:*", count=1000)
    ]
    full = [name for name in names if not name.endswith(":init")]
    ways |= {f"MGET x {depth}": raw_get(full, depth) for depth in DEPTHS if depth <= groups}
    made = [sample.group(f"{TASK}-{draw:010d}") for draw in range(groups)]
    pickled_stream.add(server.raw, [pickled_stream.as_lists(group) for group in made])
    ways[STREAM] = Way(lambda _: pickled_stream.read(server.raw, groups))
    spent = interleave(ways, rounds, server.processor_time)
    yield from _figures(f"take, {server.name}", spent, groups, "MGET x", TAKE_TARGET)
    server.clear()


def _figures(
    section: str, spent: Spent, groups: int, plain: str, target: float
) -> Iterator[Figure]:
    for name, cpu in spent.cpu.items():
        yield Figure(section, name, per_second(spent.wall, name, groups), "groups/s")
        yield Figure(section, f"{name}: processor", median(cpu) / groups * 1e6, "us/group")
    best = min(
        (name for name in spent.cpu if name.startswith(plain)),
        key=lambda name: median(spent.cpu[name]),
    )
    yield from _compared(section, spent, "ours", best, target)
    yield from _compared(section, spent, "ours", STREAM, STREAM_TARGETS[section.partition(",")[0]])


def _compared(
    section: str, spent: Spent, ours: str, theirs: str, target: float | None
) -> Iterator[Figure]:
    """Compare two ways: by the processor, which load on the machine hardly changes, and by time."""
    cpu, wall = (ratio(each, ours, theirs) for each in (spent.cpu, spent.wall))
    yield Figure(section, f"{ours} / {theirs}: processor", cpu, "x", target)
    yield Figure(section, f"{ours} / {theirs}", wall, "x")


def _set(client: Any, values: list[bytes], depth: int) -> None:
    for start in range(0, len(values), depth):
        pipe = client.pipeline(transaction=False)
        for place, value in enumerate(values[start : start + depth], start):
            pipe.set(f"raw:{place}", value)
        pipe.execute()


def _set_singly(client: Any, values: list[bytes]) -> None:
    for place, value in enumerate(values):
        client.set(f"raw:{place}", value)


def _mget(client: Any, names: list[str], depth: int) -> list[bytes]:
    found: list[bytes] = []
    for start in range(0, len(names), depth):
        found += client.mget(names[start : start + depth])
    return found
