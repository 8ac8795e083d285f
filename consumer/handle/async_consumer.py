"""`RolloutConsumer` for coroutines: the same methods, awaited.

    async with AsyncRolloutConsumer(run) as consumer:
        await consumer.open(position=position)
        batch = await consumer.take_batch(step, {"math": 16}, deadline_s=600)

Each method runs in a thread; several may run at a time. A cancelled call loses nothing: a batch
that was taken is recorded under its step, and taking it again returns it (I5); other calls are
harmless when repeated (I13).
"""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Concatenate, ParamSpec, TypeVar

from buffer.run.run import Run
from consumer.handle.batch import abandoned_by
from consumer.handle.rollout_consumer import RolloutConsumer

P = ParamSpec("P")
T = TypeVar("T")

THREADS = 8  # calls that run at a time; others wait


def _awaited(
    method: Callable[Concatenate[RolloutConsumer, P], T],
) -> Callable[Concatenate[AsyncRolloutConsumer, P], Coroutine[Any, Any, T]]:
    async def call(self: AsyncRolloutConsumer, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._in_thread(functools.partial(method, self.blocking, *args, **kwargs))

    call.__doc__ = method.__doc__
    return call


class AsyncRolloutConsumer:
    """The trainer of a run in one event loop; `blocking` is its `RolloutConsumer`."""

    def __init__(self, run: Run, *, prefetch_bytes: int = 64 * 2**20) -> None:
        self.blocking = RolloutConsumer(run, prefetch_bytes=prefetch_bytes)
        self._threads = ThreadPoolExecutor(THREADS, "rolloutmq-consumer")

    async def __aenter__(self) -> AsyncRolloutConsumer:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    open = _awaited(RolloutConsumer.open)
    check_role = _awaited(RolloutConsumer.check_role)
    take_batch = _awaited(RolloutConsumer.take_batch)
    commit = _awaited(RolloutConsumer.commit)
    pause = _awaited(RolloutConsumer.pause)
    continue_ = _awaited(RolloutConsumer.continue_)
    finish = _awaited(RolloutConsumer.finish)
    announce_weights = _awaited(RolloutConsumer.announce_weights)
    publish_weights = _awaited(RolloutConsumer.publish_weights)
    evaluate = _awaited(RolloutConsumer.evaluate)
    report = _awaited(RolloutConsumer.report)
    events = _awaited(RolloutConsumer.events)

    def stop(self) -> None:
        self.blocking.stop()

    def metrics(self) -> dict[str, float]:
        return self.blocking.metrics()

    async def close(self) -> None:
        """End the calls that still wait, and give up the role."""
        self.blocking.stop()
        try:
            await self._in_thread(self.blocking.close)
        finally:
            self._threads.shutdown(wait=False)

    async def _in_thread(self, call: Callable[[], T]) -> T:
        abandoned = threading.Event()

        def run() -> T:
            with abandoned_by(abandoned):
                return call()

        try:
            return await asyncio.wrap_future(self._threads.submit(run))
        except asyncio.CancelledError:
            abandoned.set()
            raise
