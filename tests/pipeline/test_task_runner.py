"""What a task asks of the groups that a worker makes: which are worth keeping, and how long one may take."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from buffer.errors import TaskStopped
from buffer.live_settings import LiveSettings, LiveTaskSettings
from buffer.rollout import RolloutState
from consumer.rollout_consumer import RolloutConsumer
from tests.pipeline.produce import make_producer
from tests.pipeline.yard import SLOW_S, TASK, Yard
from tests.servers import KINDS

on_both = pytest.mark.parametrize("make_yard", KINDS, indirect=True)


@on_both
def test_filtered_groups_are_counted_with_their_raw_rewards_and_made_up_for(yard: Yard, tmp_path: Path) -> None:
    def even_rows_only(states: Sequence[RolloutState]) -> bool:
        return int(states[0].extra["row"]) % 2 == 0

    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{n}", "answer": f"{n}"}) + "\n" for n in range(40)))
    producer = make_producer(yard.run, path, share=6)
    yard.run.control.open_producer(producer.nonce, take_over=True)

    async def scenario() -> None:
        worker = yard.worker(is_valid_sample=even_rows_only, judge=lambda **_: 0.5)
        async with yard.working(worker):
            while yard.places().get("completed", 0) < 6:
                state = yard.run.control.beat("producer", producer.nonce)
                await asyncio.to_thread(producer.round, state)
                await asyncio.sleep(0.01)

    asyncio.run(scenario())
    places, counters = yard.places(), yard.counters()
    assert places["completed"] == 6
    assert places["filtered"] > 0
    assert counters["raw_rewards_count"] == 2 * sum(places.values())
    yard.check()


@on_both
def test_a_group_over_its_time_limit_fails_its_tries_and_frees_the_engine(yard: Yard) -> None:
    slow = yard.enqueue(1, tokens=(100_000, 1))
    yard.enqueue(2, tokens=(5, 5))

    async def scenario() -> None:
        async with yard.working(yard.worker(token_s=SLOW_S, group_time_limit_s=0.3)) as engine:
            await yard.until_places(dead=1, completed=2)
            assert engine.unfinished() == 0

    asyncio.run(scenario())
    assert "took longer than 0.3 s" in str(yard.run.dead_letters.reason(slow[0]))
    yard.check()


def test_a_filter_that_raises_fails_the_group_with_its_words(yard: Yard) -> None:
    def broken(states: Sequence[RolloutState]) -> bool:
        raise ZeroDivisionError("no variance")

    gids = yard.enqueue(1)

    async def scenario() -> None:
        async with yard.working(yard.worker(is_valid_sample=broken)):
            await yard.until_places(dead=1)

    asyncio.run(scenario())
    assert "ZeroDivisionError: no variance" in str(yard.run.dead_letters.reason(gids[0]))


@on_both
def test_a_broken_task_is_stopped_and_the_trainer_is_told_instead_of_waiting(yard: Yard, tmp_path: Path) -> None:
    def broken(**_: object) -> float:
        raise ValueError("no verifier")

    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{n}"}) + "\n" for n in range(40)))
    producer = make_producer(yard.run, path, share=2)
    yard.run.set(LiveSettings(tasks={TASK: LiveTaskSettings(max_consecutive_failures=4)}))
    yard.run.control.open_producer(producer.nonce, take_over=True)
    started = []

    async def scenario() -> None:
        async with yard.working(yard.worker(judge=broken)):
            while not yard.run.jobs.failures(TASK)[1]:
                started.append(await asyncio.to_thread(producer.round, yard.run.control.state()))
                await asyncio.sleep(0.01)
            for _ in range(5):
                assert await asyncio.to_thread(producer.round, yard.run.control.state()) == 0

    asyncio.run(scenario())
    consumer = RolloutConsumer(yard.run)
    consumer.nonce = yard.trainer
    with pytest.raises(TaskStopped, match=r"task sums is stopped: \d+ tries failed") as caught:
        consumer.take_batch(1, {TASK: 2})
    assert "rolloutmq continue --task sums" in str(caught.value.hint)
    yard.run.jobs.forgive(TASK)
    with pytest.raises(TimeoutError):
        consumer.take_batch(1, {TASK: 2}, deadline_s=0.2)
    yard.check()
