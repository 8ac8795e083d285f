from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from buffer.control.control import Mode
from consumer.handle.rollout_consumer import RolloutConsumer
from tests.pipeline.yard import TASK, Yard
from tests.servers import KINDS

on_both = pytest.mark.parametrize("make_yard", KINDS, indirect=True)
WORKERS = 3
STEPS = 4


@on_both
async def test_engines_are_asleep_whenever_the_trainer_works_and_make_every_batch(
    yard: Yard,
) -> None:
    consumer = RolloutConsumer(yard.run, prefetch_bytes=0, nonce=yard.trainer)  # is never closed
    consumer.lineage = "l1"
    weights = {step: yard.write_weights(step) for step in range(1, STEPS + 1)}
    yard.enqueue(15 * STEPS, tokens=(30, 60))
    awake: list[bool] = []

    def train(engines: list[object]) -> None:
        for step in range(1, STEPS + 1):
            batch = consumer.take_batch(step, {TASK: 3}, deadline_s=400)
            with consumer.paused("abort"):
                awake.extend(not engine.asleep for engine in engines)  # type: ignore[attr-defined]
                path, checksum = weights[step]
                consumer.publish_weights(step, str(path), checksum)
            consumer.commit(step, keep=step)
            assert len(batch.groups) == 3
            yard.reissue()

    workers = [
        yard.worker(f"w{n}", token_s=0.002, sleep_when_paused=True, concurrency=2)
        for n in range(WORKERS)
    ]
    async with (
        yard.working(workers[0]) as a,
        yard.working(workers[1]) as b,
        yard.working(workers[2]) as c,
    ):
        await asyncio.to_thread(train, [a, b, c])
    assert len(awake) == WORKERS * STEPS
    assert not any(awake)
    assert yard.stages()["archived"] == 3 * STEPS
    yard.check()


async def test_an_engine_stays_awake_while_a_lane_is_open_or_the_pause_keeps(yard: Yard) -> None:
    async with yard.working(yard.worker(sleep_when_paused=True)) as engine:
        await yard.until(lambda: len(yard.run.fleet.workers()) == 1)
        for mode, lanes, asleep in (
            (Mode.ABORT, "eval", False),
            (Mode.ABORT, "", True),
            (Mode.ABORT, "eval", False),
            (Mode.DRAIN, "", True),
            (Mode.RUN, "", False),
            (Mode.KEEP, "", False),
        ):
            await yard.receipts(yard.run.control.set_mode("operator", mode, lanes=lanes))
            assert engine.asleep is asleep, (mode, lanes)


async def test_the_receipt_of_a_sleeping_worker_comes_after_its_last_group(
    yard: Yard, tmp_path: Path
) -> None:
    yard.enqueue(2, tokens=(40, 40))
    slept = threading.Event()
    async with yard.working(yard.worker(held=True, sleep_when_paused=True)) as engine:
        await yard.until_generating(engine, 4)
        draining = yard.run.control.set_mode("operator", Mode.DRAIN)
        engine.let_go()
        await yard.receipts(draining)
        assert engine.asleep
        assert yard.stages() == {"completed": 2}
        slept.set()
    assert slept.is_set()
