"""How long a worker waits for its judges, as its heartbeats report it and the metrics show it.

The heartbeat carries it, and Prometheus shows it as a latency. An rq judge's time includes the
queue: it is what a rollout waits, not what a judge computes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from buffer.control.histogram import JUDGE_BOUNDS_S, Histogram
from buffer.errors import JudgeError
from buffer.model.rollout import RolloutState
from producer_workers.judges.judge import AnyJudge, GroupJudge, Judge


class JudgeTimes:
    """Counts the answers of one worker's judges by the time they took, failures too.

    `asked` counts answers, failures included; `failed` the failures; `seconds` is the sum of their
    times. Measured on the event loop, read by the heartbeat's thread.
    """

    def __init__(self) -> None:
        self.failed = 0
        self.histogram = Histogram(JUDGE_BOUNDS_S)

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Count the time in the block as one answer."""
        began = time.monotonic()
        try:
            yield
        except JudgeError:
            self.failed += 1
            raise
        finally:
            self.histogram.add(time.monotonic() - began)

    def watch(self, judge: AnyJudge | None) -> AnyJudge | None:
        """Return a judge that counts the time of each answer of `judge`."""
        if judge is None:
            return None
        if isinstance(judge, GroupJudge):
            return _TimedGroupJudge(judge, self)
        return _TimedJudge(judge, self)


class _TimedJudge:
    def __init__(self, judge: Judge, times: JudgeTimes) -> None:
        self.name = judge.name
        self._judge = judge
        self._times = times

    async def judge(self, state: RolloutState) -> dict[str, float]:
        with self._times.measure():
            return await self._judge.judge(state)


class _TimedGroupJudge:
    def __init__(self, judge: GroupJudge, times: JudgeTimes) -> None:
        self.name = judge.name
        self._judge = judge
        self._times = times

    async def judge_group(self, states: Sequence[RolloutState]) -> list[dict[str, float]]:
        with self._times.measure():
            return await self._judge.judge_group(states)
