"""`rolloutmq set` in an active run: producer and worker adopt the settings, events report them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

import orjson

from buffer.config.assignments import parse_settings
from buffer.control.control import Mode
from buffer.control.live_settings import LiveSettings
from buffer.model.limits import TaskLimits
from buffer.run import Run
from buffer.wire.sampling import SampleParams
from producer_workers.datasets.files import JsonlDataset
from producer_workers.producer.producer import AgentLoopManager
from producer_workers.producer.sampler import Sampler
from producer_workers.producer.strategy import strategies_of
from tests.pipeline.yard import LONG, SLOW_S, TASK, Letters, Yard


def change(yard: Yard, *assignments: str) -> None:
    """As the command does it: with a handle of its own."""
    Run.open(yard.store, yard.run.name).set(parse_settings(LiveSettings, assignments))


def set_events(yard: Yard) -> list[str]:
    """field=value of every change, in order."""
    rows = [fields for _, fields in yard.store.control.xrange(yard.run.keys.events)]
    return [
        f"{row[b'field'].decode()}={row[b'value'].decode()}"
        for row in rows
        if row[b"event"] == b"set"
    ]


def test_the_producer_follows_weights_staleness_and_over_sampling_while_it_runs(
    make_yard: Callable[..., Yard], tmp_path: Path
) -> None:
    yard = make_yard(tasks={TASK: TaskLimits(), "more": TaskLimits()}, batch_size=8, steps=50)
    rows = [orjson.dumps({"question": f"{n}", "answer": n}) for n in range(9)]
    (tmp_path / "problems.jsonl").write_bytes(b"\n".join(rows))
    run = Run.open(yard.store, yard.run.name)
    dataset = JsonlDataset(tmp_path / "problems.jsonl")
    samplers = {
        name: Sampler(name, dataset, Letters(), SampleParams()) for name in run.limits.tasks
    }
    producer = AgentLoopManager(run, samplers, strategies_of(run.limits))
    stop = threading.Event()
    thread = threading.Thread(
        target=producer.produce_loop, args=(stop,), kwargs={"take_over": True}
    )

    async def waiting(**counts: int) -> None:
        def found() -> dict[str, int]:
            return {task.task: task.waiting for task in yard.run.account.totals().tasks}

        await yard.until(lambda: found() == {TASK: counts["sums"], "more": counts["more"]})

    async def scenario() -> None:
        await waiting(sums=4, more=4)
        change(yard, "tasks.more.weight=3")  # from step 2 on: nothing of that is started yet
        yard.publish(1)
        await waiting(sums=4 + 2, more=4 + 6)
        change(yard, "max_staleness=1")
        await waiting(sums=4 + 2 * 2, more=4 + 2 * 6)
        change(yard, "over_sample_threshold=0.5")
        await waiting(sums=4 + 2 * 2 + 1, more=4 + 2 * 6 + 3)

    thread.start()
    try:
        asyncio.run(scenario())
    finally:
        stop.set()
        thread.join()
    fields = [event.partition("=")[0] for event in set_events(yard)]
    assert fields == ["reweighted", "stale_threshold", "over_sample_threshold"]
    assert yard.store.control.hget(yard.run.keys.meta, "limits_version") == b"3"


def test_a_worker_follows_its_concurrency_while_it_runs(yard: Yard) -> None:
    """Groups that never end: what is held is what it may hold, and nothing else."""
    yard.enqueue(10, LONG)

    async def scenario() -> None:
        async with yard.working(yard.worker(token_s=SLOW_S, concurrency=6, drain_timeout_s=0.0)):
            await yard.until(lambda: yard.leases() == 6)
            change(yard, "concurrency=8")
            await yard.until(lambda: yard.leases() == 8)
            change(yard, "concurrency=2")
            await yard.until(lambda: yard.run.limits.concurrency == 2)
            # what it holds is not taken away; from now on there is room for two
            assert yard.leases() == 8
            await yard.receipts(yard.control(Mode.ABORT))
            yard.control(Mode.RUN)
            assert yard.reissue() == 8
            await yard.until(lambda: yard.leases() == 2)
            await asyncio.sleep(0.3)
            assert yard.leases() == 2

    asyncio.run(scenario())
    assert set_events(yard) == ["concurrency=8", "concurrency=2"]
    yard.check()
