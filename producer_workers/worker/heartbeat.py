"""The worker's heartbeat: a thread of its own, which a busy event loop cannot starve (I2, I10).

Each beat renews the leases, hands in the receipt for the last control change that was carried out,
and brings the control state back. The control line (`listener.py`) does the last two sooner; who
has none learns of it here.

What a worker's heartbeat says of its work: how fast, how much, how full, how often in vain.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from buffer.control.fleet import Beat, Pulse, WorkerState
from buffer.errors import Fenced, LostRun, RolloutMQError, RunError, StoreUnavailable
from buffer.model.job import Job
from buffer.run import Run
from buffer.store.retry import LogOnce
from producer_workers.engines.base import Engine, TellsLoad
from producer_workers.judges.judge_times import JudgeTimes
from producer_workers.worker.control_client import HeardControl
from producer_workers.worker.group_runner import GroupWork

log = logging.getLogger("rolloutmq.worker")


class Heart:
    """Beats for one worker until `stop`.

    `look` is called before every beat, on its thread, for what to say and what is held. The others
    on `loop`: `tell` after a beat with the answer and what had been said; `give_up` once, instead,
    when this worker is replaced or its run is gone.
    """

    def __init__(
        self,
        run: Run,
        worker: str,
        nonce: str,
        facts: Mapping[str, str],
        look: Callable[[], tuple[Pulse, Sequence[Job]]],
        loop: asyncio.AbstractEventLoop,
        tell: Callable[[Beat, Pulse], None],
        give_up: Callable[[RolloutMQError], None],
    ) -> None:
        self._run = run
        self._worker = worker
        self._nonce = nonce
        self._facts = facts
        self._look = look
        self._tell = tell
        self._give_up = give_up
        self._later = loop.call_soon_threadsafe
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._silence = LogOnce(log, "no heartbeat")
        self._thread = threading.Thread(target=self._beat_on, name="heartbeat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def poke(self) -> None:
        """Beat now."""
        self._wake.set()

    def stop(self) -> None:
        """Beat no more. Returns once the last beat is over."""
        self._stopping.set()
        self._wake.set()
        self._thread.join()

    def _beat_on(self) -> None:
        due = swept = time.monotonic()
        while not self._stopping.is_set():
            self._wake.clear()
            is_due = time.monotonic() >= due
            if is_due:
                due = time.monotonic() + self._run.limits.heartbeat_ms / 1000
            try:
                self._beat(is_due)
                # leases of dead workers must run out, and memory be freed, even when the producer
                # is down
                if time.monotonic() - swept > self._run.limits.lease_ms / 2000:
                    self._run.janitor.sweep_in_turn()
                    swept = time.monotonic()
                self._silence.report("")
            except StoreUnavailable as error:
                self._silence.report(error.hint)
            except (Fenced, RunError) as error:
                self._later(self._give_up, error)
                return
            except RolloutMQError:
                log.exception("a heartbeat failed")
            self._wake.wait(max(0.0, due - time.monotonic()))

    def _beat(self, is_due: bool) -> None:
        """One that comes early, for a receipt, is as light as can be: leases and limits have time
        until the next.
        """
        if is_due:
            self._run.refresh_limits()
        pulse, held = self._look()
        held = held if is_due else ()
        beat = self._run.fleet.heartbeat(self._worker, self._nonce, pulse, held)
        if not beat.known and not self._stopping.is_set():
            log.warning("the server does not know this worker (any more); registering again")
            run_nonce, control = self._run.fleet.register(self._worker, self._nonce, self._facts)
            if run_nonce != self._run.nonce:
                what = f"the server holds another run named {self._run.name!r} now"
                raise LostRun(what, hint="start this worker again")
            beat = Beat(True, control, beat.lost)
        self._later(self._tell, beat, pulse)


class PulseTaker:
    """Takes the pulse of one worker, on the heartbeat's thread."""

    def __init__(
        self, engine: Engine, work: GroupWork, control: HeardControl, judge_times: JudgeTimes
    ) -> None:
        self._engine = engine
        self._work = work
        self._control = control
        self._judge_times = judge_times
        self._rate = (time.monotonic(), 0, 0.0)

    def take(self, state: WorkerState, concurrency: int) -> Pulse:
        weights = self._engine.version()
        heard = self._control.epoch
        load = self._engine.load() if isinstance(self._engine, TellsLoad) else None
        judge_times = self._judge_times.histogram
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
            judged=judge_times.count,
            judging_ms=round(1000 * judge_times.total_s),
            judge_failures=self._judge_times.failed,
            judge_buckets=judge_times.counts,
        )

    def _tokens_per_s(self) -> float:
        """Between the last two beats that were a second apart."""
        then, tokens, _ = self._rate
        now = time.monotonic()
        made = self._work.tokens
        if now - then > 1.0:
            self._rate = (now, made, (made - tokens) / (now - then))
        return self._rate[2]
