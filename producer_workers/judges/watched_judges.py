"""Watch the judges of one worker: time each call, contain its errors, end it in a pause.

A call ends with a reward, a JudgeError that names the judge, or JudgeInterrupted after `grace_s`
seconds of an abort pause; that rollout keeps its tokens and is judged at the next claim.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol, TypeVar

from buffer.control.worker_record import JUDGE_BOUNDS_S, Histogram
from buffer.errors import JudgeError, JudgeInterrupted, ModelError, RolloutMQError, Skip, describe
from buffer.observers import Observer, all_of
from buffer.wire.own_copy import readers_copy
from buffer.wire.rollout import RolloutState
from producer_workers.config.attached_judge import ColumnJudge
from producer_workers.judges.judge import Judge, add_columns
from producer_workers.user_code.process_function import ProcessFunction
from producer_workers.user_code.user_function import UserFunction, outcome_of

T = TypeVar("T")

# Returns what a call returns, as `WatchedJudges.run` does.
Run = Callable[..., Awaitable[Any]]


class Closes(Protocol):
    """A judge or a filter that holds processes until `close`."""

    def close(self) -> None: ...


class _Call:
    """A call that has begun. `interrupted` is resolved to end it."""

    def __init__(self, grace_s: float) -> None:
        self.grace_s = grace_s
        self.began_s = time.monotonic()
        self.interrupted: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def interrupt(self) -> None:
        if not self.interrupted.done():
            self.interrupted.set_result(None)


class WatchedJudges:
    """The judges of one worker. Used on its event loop only."""

    def __init__(self, times: JudgeTimes | None = None) -> None:
        self.times = times or JudgeTimes()
        self._calls = set[_Call]()
        self._closed_at_end: list[Closes] = []
        self._epoch = 0
        self._paused_s = 0.0
        self._is_ending = False

    def watch(self, judge: Judge, grace_s: float) -> Judge:
        """Return `judge`, watched. A pause waits `grace_s` seconds for it."""
        self.close_at_end(judge)
        run = partial(self._timed, f"judge {judge.name!r}", grace_s)
        return _WatchedJudge(judge, run, self.times)

    def watch_filter(
        self, what: str, call: UserFunction | ProcessFunction, grace_s: float
    ) -> Callable[[Sequence[RolloutState]], Awaitable[bool]]:
        """Return what asks a filter of groups, watched, whether to train a completed group."""

        async def keeps(states: Sequence[RolloutState]) -> bool:
            return bool(await self.run(grace_s, what, partial(call, states)))

        self.close_at_end(call)
        return keeps

    def watch_columns(self, judge: ColumnJudge, grace_s: float) -> WatchedColumns:
        """Return `judge`, watched and timed as others."""
        return WatchedColumns(judge, partial(self._timed, f"judge {judge.name!r}", grace_s))

    def close_at_end(self, judge: Closes) -> None:
        self._closed_at_end.append(judge)

    async def _timed(
        self, what: str, grace_s: float, call: Callable[[], Awaitable[T]], answers: int = 1
    ) -> T:
        with self.times.measure(answers):
            return await self.run(grace_s, what, call)

    async def run(self, grace_s: float, what: str, call: Callable[[], Awaitable[T]]) -> T:
        """Return what `call` returns.

        Raises JudgeError, JudgeInterrupted, Skip, and ModelError where its model is gone.
        """
        if self._is_ending:
            raise JudgeInterrupted(f"the worker leaves: {what} is not called")
        running = _Call(grace_s)
        self._calls.add(running)
        work = asyncio.ensure_future(outcome_of(call))
        try:
            both: set[asyncio.Future[Any]] = {work, running.interrupted}
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._calls.discard(running)
            work.cancel()  # not awaited: it may ignore that
        if not work.done():
            raise JudgeInterrupted(f"a pause or the end of the worker ended {what}")
        outcome = work.result()
        error = outcome.error
        if isinstance(error, JudgeError | ModelError | Skip):
            raise error
        if isinstance(error, RolloutMQError):
            raise JudgeError(error.message, hint=error.hint) from error
        if error is not None:
            raise JudgeError(f"{what} raised {describe(error)}") from error
        result: T = outcome.result
        return result

    def pause(self, epoch: int) -> None:
        """End calls whose grace in the pause of `epoch` is over. Called repeatedly."""
        now_s = time.monotonic()
        if epoch != self._epoch:
            self._epoch = epoch
            self._paused_s = now_s
        for call in self._calls:
            if now_s - max(self._paused_s, call.began_s) >= call.grace_s:
                call.interrupt()

    def interrupt(self) -> None:
        """End all calls at once, and begin no other: the worker leaves."""
        self._is_ending = True
        for call in self._calls:
            call.interrupt()

    def close(self) -> None:
        for judge in self._closed_at_end:
            judge.close()


class _WatchedJudge(Judge):
    def __init__(self, judge: Judge, run: Run, times: JudgeTimes) -> None:
        self.name = judge.name
        self.sees_group = judge.sees_group
        self.is_quick = judge.is_quick
        self._judge = judge
        self._run = run
        self._times = times

    async def ask(self, states: Sequence[RolloutState]) -> list[dict[str, float]]:
        rewards: list[dict[str, float]] = await self._run(lambda: self._judge.ask(states))
        return rewards

    async def judge_each(
        self, states: Sequence[RolloutState]
    ) -> list[dict[str, float] | RolloutMQError]:
        judged: list[dict[str, float] | RolloutMQError]
        judged = await self._run(lambda: self._judge.judge_each(states), len(states))
        self._times.failed += sum(isinstance(each, RolloutMQError) for each in judged)
        return judged


class WatchedColumns:
    """A judge that adds columns to groups: it gets copies, and its answers are checked."""

    def __init__(self, judge: ColumnJudge, run: Run) -> None:
        self._judge = judge
        self._run = run
        self.open = judge.open
        self.close = judge.close

    async def add_to(self, states: Sequence[RolloutState]) -> None:
        """Add its columns to the rollouts of a group. Raises as `WatchedJudges.run`."""
        answers = await self._run(lambda: self._judge.ask(readers_copy(list(states))))
        add_columns(self._judge.name, states, answers)


def reported(judges: Iterable[WatchedJudges]) -> dict[str, Any]:
    """Return the fields of a heartbeat that count answers."""
    times = [each.times for each in judges]
    return {
        "judged": sum(each.histogram.count for each in times),
        "judging_ms": round(1000 * sum(each.histogram.total_s for each in times)),
        "judge_failures": sum(each.failed for each in times),
        "judge_buckets": tuple(map(sum, zip(*(t.histogram.counts for t in times), strict=True))),
    }


class JudgeTimes:
    """Counts the answers of one worker's judges by their times, on the event loop.

    The histogram includes those that `failed`. The heartbeat's thread reads both.
    """

    def __init__(self, observers: Sequence[Observer] = ()) -> None:
        self._observers = observers
        self.failed = 0
        self.histogram = Histogram(JUDGE_BOUNDS_S)

    @contextmanager
    def measure(self, answers: int = 1) -> Iterator[None]:
        """Count the time in the block as that of so many answers, unless a pause ends it."""
        began = time.monotonic()
        try:
            with all_of(observer.judging() for observer in self._observers):
                yield
        except JudgeError:
            self.failed += answers
            raise
        except BaseException:
            answers = 0
            raise
        finally:
            seconds = time.monotonic() - began
            for _ in range(answers):
                self.histogram.add(seconds / answers)
