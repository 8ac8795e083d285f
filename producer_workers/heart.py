"""The worker's heartbeat: a thread of its own, which a busy event loop cannot starve (I2, I10).

Each beat renews the leases, hands in the receipt for the last control change that was carried out, and brings
the control state back. A hint on the control channel only makes the next beat come at once.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import redis

from buffer.errors import Fenced, LostRun, RolloutMQError, RunError, StoreUnavailable
from buffer.fleet import Beat, Pulse
from buffer.job import Job
from buffer.run import Run
from buffer.store import open_client

log = logging.getLogger("rolloutmq.worker")


class Heart:
    """Beats for one worker until `stop`.

    `look` is called before every beat for what to say and what is held; `tell` after it with the answer and what had
    been said; `give_up` once, instead, when this worker is replaced or its run is gone. All on this thread.
    """

    def __init__(
        self,
        run: Run,
        worker: str,
        nonce: str,
        facts: Mapping[str, str],
        look: Callable[[], tuple[Pulse, Sequence[Job]]],
        tell: Callable[[Beat, Pulse], None],
        give_up: Callable[[RolloutMQError], None],
    ) -> None:
        self._run, self._worker, self._nonce, self._facts = run, worker, nonce, facts
        self._look, self._tell, self._give_up = look, tell, give_up
        self._wake, self._stopping = threading.Event(), threading.Event()
        self._threads = [
            threading.Thread(target=self._beat_on, name="heartbeat", daemon=True),
            threading.Thread(target=self._listen_on, name="hints", daemon=True),
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def poke(self) -> None:
        """Beat now."""
        self._wake.set()

    def stop(self) -> None:
        """Beat no more. Returns once the last beat is over."""
        self._stopping.set()
        self._wake.set()
        self._threads[0].join()

    def _beat_on(self) -> None:
        reaped = time.monotonic()
        while not self._stopping.is_set():
            self._wake.clear()
            try:
                self._beat()
                # leases of dead workers must run out even when the producer is down, too
                if time.monotonic() - reaped > self._run.limits.lease_ms / 2000:
                    self._run.jobs.reap()
                    reaped = time.monotonic()
            except StoreUnavailable as error:
                log.warning("no heartbeat: %s", error)
            except (Fenced, RunError) as error:
                self._give_up(error)
                return
            except RolloutMQError:
                log.exception("a heartbeat failed")
            self._wake.wait(self._run.limits.heartbeat_ms / 1000)

    def _beat(self) -> None:
        pulse, held = self._look()
        beat = self._run.fleet.heartbeat(self._worker, self._nonce, pulse, held)
        if not beat.known and not self._stopping.is_set():
            log.warning("the server does not know this worker (any more); registering again")
            run_nonce, control = self._run.fleet.register(self._worker, self._nonce, self._facts)
            if run_nonce != self._run.nonce:
                what = f"the server holds another run named {self._run.name!r} now"
                raise LostRun(what, hint="start this worker again")
            beat = Beat(True, control, beat.lost)
        self._tell(beat, pulse)

    def _listen_on(self) -> None:
        client: Any = open_client(self._run.store.url, name=f"{self._run.store.name}-hints", timeout_s=5.0)
        while not self._stopping.is_set():
            try:
                with client.pubsub(ignore_subscribe_messages=False) as channel:
                    # the answer to subscribe pokes as well: subscribe first, then look, leaves no gap
                    channel.subscribe(self._run.keys.control)
                    while not self._stopping.is_set():
                        if channel.get_message(timeout=1.0):
                            self.poke()
            except redis.RedisError:
                # deaf for a while: the heartbeat hears the same, only later
                self._stopping.wait(1.0)
        client.close()
