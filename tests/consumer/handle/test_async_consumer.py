from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from buffer.run.run import Run
from buffer.wire import group_bytes
from consumer.handle.async_consumer import AsyncRolloutConsumer
from consumer.handle.batch import Stopped
from consumer.handle.wait_rules import WaitReason
from tests.consumer.handle.crew import at_work

GENEROUS_S = 400.0


def drive(run: Run, story: Callable[[AsyncRolloutConsumer], Awaitable[None]]) -> None:
    async def main() -> None:
        async with AsyncRolloutConsumer(run) as consumer:
            await consumer.open()
            await asyncio.wait_for(story(consumer), GENEROUS_S)

    asyncio.run(main())


def test_a_cancelled_take_loses_nothing_and_the_loop_continues_meanwhile(run: Run) -> None:
    """Cancel the take again and again while groups are submitted.

    Sometimes that is just after the batch was recorded.
    """
    turns = 0

    async def tick() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0.001)

    async def story(consumer: AsyncRolloutConsumer) -> None:
        ticking = asyncio.create_task(tick())
        seen: list[str] = []
        with at_work(run, math=12) as crew:
            for step in range(1, 5):
                for patience_s in (0.001, 0.005, 0.02, 0.05, 0.1):
                    with pytest.raises(TimeoutError):
                        await asyncio.wait_for(consumer.take_batch(step, {"math": 13}), patience_s)
                batch = await consumer.take_batch(step, {"math": 3})
                again = await consumer.take_batch(step, {"math": 3})
                assert [group_bytes.encode(g) for g in again.groups] == [
                    group_bytes.encode(g) for g in batch.groups
                ]
                seen += batch.manifest.gids
                await consumer.commit(step, keep=step)
            assert crew.epochs
        ticking.cancel()
        assert len(seen) == len(set(seen)) == 12
        assert run.account.fsck().clean

    drive(run, story)
    assert turns > 20


def test_cancelling_between_record_and_answer_gives_the_same_batch_to_the_next_take(
    run: Run,
) -> None:
    async def story(consumer: AsyncRolloutConsumer) -> None:
        with at_work(run, math=3):
            recorded = asyncio.Event()
            original = run.ledger.take
            loop = asyncio.get_running_loop()

            def take(*args: object, **kwargs: object) -> object:
                answer = original(*args, **kwargs)  # type: ignore[arg-type]
                if run.ledger.steps()[0] == 1:
                    loop.call_soon_threadsafe(recorded.set)
                return answer

            run.ledger.take = take  # type: ignore[method-assign, assignment]
            taking = asyncio.create_task(consumer.take_batch(1, {"math": 3}))
            await recorded.wait()
            taking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await taking
            run.ledger.take = original  # type: ignore[method-assign]
            batch = await consumer.take_batch(1, {"math": 99})
            assert sorted(batch.manifest.gids) == [f"math-{draw:010d}" for draw in range(3)]

    drive(run, story)


def test_a_commit_goes_through_while_a_batch_is_awaited(run: Run) -> None:
    async def story(consumer: AsyncRolloutConsumer) -> None:
        with at_work(run, math=2):
            await consumer.take_batch(1, {"math": 2})
            waiting = asyncio.create_task(consumer.take_batch(2, {"math": 2}))
            await consumer.commit(1, keep=1)
            assert run.ledger.steps() == (1, 1, 1)
            assert not waiting.done()
            consumer.stop()
            with pytest.raises(Stopped):
                await waiting

    drive(run, story)


def test_a_wait_reports_what_is_missing_and_who_could_generate_it(run: Run) -> None:
    reasons: list[WaitReason] = []

    async def story(consumer: AsyncRolloutConsumer) -> None:
        with pytest.raises(
            TimeoutError, match=r"math 0 of 3; of math, 0 wait and 0 run; there is no live worker$"
        ):
            await consumer.take_batch(1, {"math": 3}, deadline_s=0.05)
        taking = asyncio.create_task(consumer.take_batch(1, {"math": 3}, waiting=reasons.append))
        while not reasons:
            await asyncio.sleep(0.001)
        taking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await taking
        await consumer.pause("keep")
        with pytest.raises(TimeoutError, match="the run is paused"):
            await consumer.take_batch(1, {"math": 3}, deadline_s=0.05)
        names = [event[1] for _, event in await consumer.events()]
        assert names[:2] == ["created", "trainer_opened"]
        assert "control" in names

    drive(run, story)
    assert reasons[0].workers == 0
    assert reasons[0].started == {"math": (0, 0)}
