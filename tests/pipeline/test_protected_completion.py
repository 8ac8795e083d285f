"""A pause waits for a group that was interrupted too often, for no other, and not for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from buffer.control.control import Mode
from buffer.ids import new_nonce
from buffer.wire.rollout import Status
from tests.pipeline.yard import FIRST, LONG, SLOW_S, TASK, WatchedEngine, Yard


def enqueue_tail(yard: Yard, tokens: tuple[int, int]) -> str:
    """Enqueue a group that was interrupted once, which is too often, and waits again."""
    (gid,) = yard.enqueue(1, tokens)
    nonce = new_nonce()
    jobs = yard.run.jobs
    yard.run.fleet.register("hand", nonce, {})
    (job,) = jobs.claim("hand", nonce, new_nonce(), FIRST, 1).jobs
    jobs.release("hand", job, "aborted")
    assert jobs.reissue(yard.producer, TASK, "expired", 10_000) == 1
    yard.run.fleet.deregister("hand", nonce)
    return gid


def test_pause_waits_for_the_protected_group_and_aborts_the_others_with_their_tokens(
    make_yard: Callable[..., Yard],
) -> None:
    yard = make_yard(tail_batch_max_tries=1)
    protected = enqueue_tail(yard, (250, 250))
    (other,) = yard.enqueue(1, LONG)

    async def scenario() -> None:
        async with yard.working(yard.worker(token_s=SLOW_S, partial_rollout=True)) as engine:
            await yard.until_generating(engine, 4)
            await yard.receipts(yard.control(Mode.ABORT))
            assert yard.leases() == 0
            assert yard.places() == {"completed": 1, "aborted": 1}

    asyncio.run(scenario())
    assert yard.group(protected).lengths.tolist() == [250, 250]
    assert yard.group(other).status is Status.ABORTED
    assert (yard.group(other).lengths > 0).all()
    assert (yard.group(other).lengths < 5000).all()
    yard.check()


def test_pause_ends_a_protected_group_that_takes_too_long(make_yard: Callable[..., Yard]) -> None:
    yard = make_yard(tail_batch_max_tries=1, pause_timeout_s=0.5)
    gid = enqueue_tail(yard, LONG)

    async def scenario() -> None:
        async with yard.working(yard.worker(token_s=SLOW_S)) as engine:
            await yard.until_generating(engine, 2)
            await yard.receipts(yard.control(Mode.ABORT))
            assert yard.places() == {"expired": 1}
            assert engine.unfinished() == 0

    asyncio.run(scenario())
    assert yard.run.record(gid)["aborts"] == "2"
    yard.check()


def test_an_engine_that_cannot_abort_some_continues_with_all_until_the_protected_one_is_done(
    make_yard: Callable[..., Yard],
) -> None:
    yard = make_yard(tail_batch_max_tries=1)
    protected = enqueue_tail(yard, (250, 250))
    (other,) = yard.enqueue(1, LONG)
    worker: Any = yard.worker(token_s=SLOW_S, partial_rollout=True)
    worker._engine._engine = OnlyWhatIsAsked(worker.engine)

    async def scenario() -> None:
        async with yard.working(worker) as engine:
            await yard.until_generating(engine, 4)
            await yard.receipts(yard.control(Mode.ABORT))
            assert yard.places() == {"completed": 1, "aborted": 1}

    asyncio.run(scenario())
    assert yard.group(protected).lengths.tolist() == [250, 250]
    assert (yard.group(other).lengths > 50).all()
    yard.check()


class OnlyWhatIsAsked:
    """`Engine` and nothing else."""

    def __init__(self, engine: WatchedEngine) -> None:
        self.name = engine.name
        self.start = engine.start
        self.generate = engine.generate
        self.pause = engine.pause
        self.resume = engine.resume
        self.load_weights = engine.load_weights
        self.sleep = engine.sleep
        self.wake = engine.wake
        self.version = engine.version
        self.check_health = engine.check_health
        self.shutdown = engine.shutdown
