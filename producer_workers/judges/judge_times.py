"""Measure how long a worker waits for its judges.

The heartbeat carries it, and Prometheus shows it as a latency. An rq judge's time includes the
queue: it is what a rollout waits, not what a judge computes.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Lock

from buffer.errors import JudgeError
from buffer.model.rollout import RolloutState
from producer_workers.judges.judge import AnyJudge, GroupJudge, Judge

NEWEST = 1024
"""The number of newest answers that quantiles are taken of."""


class JudgeTimes:
    """Times of answers.

    `asked` counts answers, failures included; `failed` the failures; `seconds` is the sum of their
    times. Measured on the event loop, read by the heartbeat's thread.
    """

    def __init__(self) -> None:
        self.asked = 0
        self.failed = 0
        self.seconds = 0.0
        self._newest: deque[float] = deque(maxlen=NEWEST)
        self._lock = Lock()

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Measure one answer."""
        began = time.monotonic()
        try:
            yield
        except JudgeError:
            self.failed += 1
            raise
        finally:
            took = time.monotonic() - began
            with self._lock:
                self._newest.append(took)
            self.asked += 1
            self.seconds += took

    def quantiles(self, *shares: float) -> list[float]:
        """Return the seconds within which these shares of the newest answers came, 0 at first."""
        with self._lock:
            newest = sorted(self._newest)
        if not newest:
            return [0.0] * len(shares)
        return [newest[min(int(share * len(newest)), len(newest) - 1)] for share in shares]

    def watch(self, judge: AnyJudge | None) -> AnyJudge | None:
        """Return the same judge, with its answers measured."""
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
