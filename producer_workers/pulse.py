"""What a worker's heartbeat says of its work: how fast, how much, how full, how often in vain."""

from __future__ import annotations

import time

from buffer.worker_record import Pulse, WorkerState
from producer_workers.engines.base import Engine
from producer_workers.engines.capabilities import TellsLoad
from producer_workers.group_work import GroupWork
from producer_workers.heard_control import HeardControl
from producer_workers.judges.judge_times import JudgeTimes


class PulseTaker:
    """Takes the pulse of one worker, on the heartbeat's thread."""

    def __init__(self, engine: Engine, work: GroupWork, control: HeardControl, judge_times: JudgeTimes) -> None:
        self._engine, self._work, self._control, self._judge_times = engine, work, control, judge_times
        self._rate = (time.monotonic(), 0, 0.0)

    def take(self, state: WorkerState, concurrency: int) -> Pulse:
        weights, heard = self._engine.version(), self._control.epoch
        load = self._engine.load() if isinstance(self._engine, TellsLoad) else None
        half, most = self._judge_times.quantiles(0.5, 0.99)
        return Pulse(
            ack=self._control.ack,
            weights=weights,
            state=state,
            tokens_per_s=self._tokens_per_s(),
            done=self._work.done,
            heard=heard,
            concurrency=concurrency,
            requests=load.running + load.waiting if load else None,
            failed=self._work.failed,
            judging=self._work.judging(),
            judged=self._judge_times.asked,
            judging_ms=round(1000 * self._judge_times.seconds),
            judge_failures=self._judge_times.failed,
            judge_p50_ms=round(1000 * half),
            judge_p99_ms=round(1000 * most),
        )

    def _tokens_per_s(self) -> float:
        """Between the last two beats that were a second apart."""
        then, tokens, _ = self._rate
        now, made = time.monotonic(), self._work.tokens
        if now - then > 1.0:
            self._rate = (now, made, (made - tokens) / (now - then))
        return self._rate[2]
