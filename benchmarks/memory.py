"""What a group costs in the server's memory, beside its bytes."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks import sample
from benchmarks.bench_run import BenchRun
from benchmarks.figure import Figure
from benchmarks.server import BenchServer

_EVENTS = 11_000


def memory(server: BenchServer, groups: int) -> Iterator[Figure]:
    """Measure the index with many small groups, and the total with fewer full-sized ones."""
    section = f"memory, {server.version}"
    added, stored, occupied = _added(server, groups, sample.SMALL)
    asked = 493 if server.version.startswith("Valkey") else 605
    yield Figure(section, "index per group", (added - occupied) / groups, "bytes", asked, "less")
    yield Figure(
        section, "index and keys of payloads, per group", (added - stored) / groups, "bytes"
    )
    added, stored, _ = _added(server, max(64, groups // 20), sample.FULL)
    yield Figure(section, "all bytes / payload bytes", added / stored, "x", 1.1, "less")


def _added(server: BenchServer, groups: int, shape: sample.Shape) -> tuple[int, int, int]:
    """Return the bytes of `groups` in total, of their payloads, and of payloads with keys."""
    run = BenchRun(server)
    _fill_events(run)
    run.make_ready(256, shape)
    before = used_bytes(server)
    before_payloads = _payload_bytes(run)
    run.make_ready(groups, shape)
    added = used_bytes(server) - before
    payloads = _payload_bytes(run)
    server.clear()
    return added, payloads[0] - before_payloads[0], payloads[1] - before_payloads[1]


def _fill_events(run: BenchRun) -> None:
    # the stream of events is capped: what it costs in all is not what a group costs
    pipe = run.raw.pipeline(transaction=False)
    for _ in range(_EVENTS):
        pipe.xadd(
            run.keys.events,
            {"event": "completed", "gid": "math-0000000000", "version": "0", "tokens": "1"},
        )
    pipe.execute()


def used_bytes(server: BenchServer) -> int:
    """Memory in use, without what the clients of the moment take."""
    info = server.raw.info("memory")
    return int(info["used_memory"]) - int(info.get("mem_clients_normal", 0))


def _payload_bytes(run: BenchRun) -> tuple[int, int]:
    """Lengths of all payloads, and what they occupy together with their keys."""
    pipe = run.raw.pipeline(transaction=False)
    for name in run.raw.scan_iter(f"{run.keys.prefix}payload:*", count=1000):
        pipe.strlen(name)
        pipe.memory_usage(name, samples=0)
    numbers = pipe.execute()
    return sum(numbers[::2]), sum(numbers[1::2])
