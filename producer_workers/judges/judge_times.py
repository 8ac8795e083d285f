"""How long a worker waits for its judges: what its heartbeat tells, and Prometheus makes a latency of.

An rq judge's time includes the queue: it is what a rollout waits, not what a judge computes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from buffer.rollout import RolloutState
from producer_workers.judges.judge import AnyJudge, GroupJudge, Judge


class JudgeTimes:
    """`asked`: answers so far, failures too; `seconds`: what all of them took together."""

    def __init__(self) -> None:
        self.asked, self.seconds = 0, 0.0

    @contextmanager
    def measure(self) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self.asked += 1
            self.seconds += time.monotonic() - began

    def watch(self, judge: AnyJudge | None) -> AnyJudge | None:
        """The same judge, with its time taken."""
        if judge is None:
            return None
        return _TimedGroupJudge(judge, self) if isinstance(judge, GroupJudge) else _TimedJudge(judge, self)


class _TimedJudge:
    def __init__(self, judge: Judge, times: JudgeTimes) -> None:
        self.name, self._judge, self._times = judge.name, judge, times

    async def judge(self, state: RolloutState) -> dict[str, float]:
        with self._times.measure():
            return await self._judge.judge(state)


class _TimedGroupJudge:
    def __init__(self, judge: GroupJudge, times: JudgeTimes) -> None:
        self.name, self._judge, self._times = judge.name, judge, times

    async def judge_group(self, states: Sequence[RolloutState]) -> list[dict[str, float]]:
        with self._times.measure():
            return await self._judge.judge_group(states)
