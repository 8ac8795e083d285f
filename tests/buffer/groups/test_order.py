"""The order in which ready groups are taken: neither order takes stale groups, or loses any (I8)."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from buffer.limits import RunLimits, TaskLimits
from buffer.redis.store import Store
from tests.buffer.scene import Scene

Make = Callable[..., Scene]


# fifo merges the first groups of each version: it must be the order of arrival, whatever the versions
@given(
    versions=st.lists(st.integers(0, 70), min_size=1, max_size=80),
    count=st.integers(1, 80),
    cut=st.integers(0, 30),
)
def test_fifo_is_the_order_of_arrival_among_64_versions(
    versions: list[int], count: int, cut: int
) -> None:
    limits = RunLimits(tasks={"math": TaskLimits()}, order="fifo", stale_threshold=71)
    store = Store("memory://order")
    scene = Scene(store, store.client, "order", limits)
    pool = scene.keys.pool("math", "completed")
    for arrival, version in enumerate(versions):
        gid = f"math-{arrival:010d}"
        record = {"payload": "t", "chunks": 1, "size": 1, "crc": "0", "samples": 1}
        scene.raw.hset(scene.keys.group(gid), mapping=record | {"version": version})
        scene.raw.zadd(pool, {f"{arrival:010d}:{gid}": version})
    scene.raw.hset(scene.keys.ledger("train"), "taken", 70 + cut)  # the next step is 71 + cut
    oldest = sorted({version for version in versions if version >= cut})[:64]
    wanted = [n for n, version in enumerate(versions) if version in oldest][:count]
    found = [int(entry.gid[-10:]) for entry in scene.run.buffer.peek(count, "math")]
    scene.raw.flushall()
    store.close()
    assert found == wanted
