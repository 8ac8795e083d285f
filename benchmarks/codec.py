"""What a group costs between Redis and the device: its bytes, and its part of micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

from benchmarks import sample
from benchmarks.bench_run import TASK, BenchRun
from benchmarks.figure import Figure, Way, interleave, ratio
from benchmarks.server import BenchServer
from buffer.wire import group_bytes
from consumer.grpo.policy.micro_batch import MicroBatches, Packer
from consumer.handle.batch import BatchTable
from consumer.handle.rollout_consumer import RolloutConsumer

REPEATS = 200
ENCODE_US = 40.0
DECODE_US = 30.0
PACK_SHARE = 0.1
TOKEN_BUDGET = 16_384


def codec(rounds: int) -> Iterator[Figure]:
    """Measure what one group costs, in a loop: written and read with all checks, and copied."""
    group = sample.group(f"{TASK}-{7:010d}")
    data = group_bytes.encode(group)
    ways = {
        "encode": _repeated(lambda: group_bytes.encode(group)),
        "encode, all checks": _repeated(lambda: group_bytes.encode_checked(group)),
        "decode, all checks": _repeated(lambda: group_bytes.decode(data)),
        "copy of its bytes": _repeated(lambda: bytearray(data)),
    }
    targets = {"encode, all checks": ENCODE_US, "decode, all checks": DECODE_US}
    taken = interleave(ways, rounds).wall
    for name, seconds in taken.items():
        yield _microseconds(name, median(seconds) / REPEATS, targets.get(name))


def pack(server: BenchServer, groups: int, rounds: int) -> Iterator[Figure]:
    """Measure the way from a batch to micro-batches, as a share of its take.

    "plan" is what a step does before its first forward pass; "all" builds every micro-batch, too,
    one after another, on a CPU.
    """
    run = BenchRun(server)
    run.make_ready(groups)
    consumer = RolloutConsumer(run.run, prefetch_bytes=0, nonce=run.trainer)
    taken_groups = [sample.group(f"{TASK}-{draw:010d}") for draw in range(groups)]
    packer = Packer(TOKEN_BUDGET)

    def plan(_: Any) -> MicroBatches:
        return packer.pack_pad_dispatch(BatchTable.of(taken_groups))

    def build(_: Any) -> int:
        return sum(len(batch.targets) for batch in plan(None))

    ways = {
        "take": Way(
            lambda _: consumer.take_batch(1, {TASK: groups}), clean=lambda: run.undo_take(1)
        ),
        "plan of micro-batches": Way(plan),
        "all micro-batches": Way(build),
    }
    taken = interleave(ways, rounds).wall
    section = f"pack, {server.name}"
    for name in ("plan of micro-batches", "all micro-batches"):
        yield Figure(section, name, 1000 * median(taken[name]), "ms")
        yield Figure(section, f"{name} / take", ratio(taken, "take", name), "x", PACK_SHARE, "less")
    server.clear()


def _repeated(call: Callable[[], object]) -> Way:
    def run(_: Any) -> None:
        for _ in range(REPEATS):
            call()

    return Way(run)


def _microseconds(name: str, seconds: float, target: float | None = None) -> Figure:
    return Figure("one group", name, 1e6 * seconds, "us", target, "less")
