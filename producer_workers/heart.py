"""The worker's heartbeat: a thread of its own, which a busy event loop cannot starve (I2, I10).

Each beat renews the leases, hands in the receipt for the last control change that was carried out, and brings
the control state back. A hint on the control channel carries the same state at once; who hears none learns of it here.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import redis

from buffer.control import ControlState
from buffer.errors import Fenced, LostRun, RolloutMQError, RunError, ScriptError, StoreUnavailable
from buffer.fleet import Beat, Pulse
from buffer.job import Job
from buffer.run import Run
from buffer.server.url import open_client
from producer_workers.said_once import SaidOnce

log = logging.getLogger("rolloutmq.worker")


LISTEN_S = 0.25
"""How long the thread that hears hints waits at a time: so much later than asked it ends, at most."""


class Heart:
    """Beats for one worker until `stop`.

    `look` is called before every beat, on its thread, for what to say and what is held. The others on `loop`: `tell`
    after a beat with the answer and what had been said; `give_up` once, instead, when this worker is replaced or its
    run is gone; `hint` with what the control channel says: it may be late, or come twice.
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
        hint: Callable[[ControlState], None],
    ) -> None:
        self._run, self._worker, self._nonce, self._facts = run, worker, nonce, facts
        self._look, self._tell, self._give_up, self._hint = look, tell, give_up, hint
        self._later = loop.call_soon_threadsafe
        self._wake, self._stopping = threading.Event(), threading.Event()
        self._silence = SaidOnce(log, "no heartbeat")
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
        """Beat no more. Returns once the last beat is over, and nobody listens on the store's connections."""
        self._stopping.set()
        self._wake.set()
        for thread in self._threads:
            thread.join()

    def _beat_on(self) -> None:
        due = swept = time.monotonic()
        while not self._stopping.is_set():
            self._wake.clear()
            is_due = time.monotonic() >= due
            if is_due:
                due = time.monotonic() + self._run.limits.heartbeat_ms / 1000
            try:
                self._beat(is_due)
                # leases of dead workers must run out, and memory be freed, even when the producer is down
                if time.monotonic() - swept > self._run.limits.lease_ms / 2000:
                    # a disk that hangs must not stop the heart
                    self._run.janitor.sweep(files=False, archive=False)
                    swept = time.monotonic()
                self._silence.say("")
            except StoreUnavailable as error:
                self._silence.say(error.hint)
            except (Fenced, RunError) as error:
                self._later(self._give_up, error)
                return
            except RolloutMQError:
                log.exception("a heartbeat failed")
            self._wake.wait(max(0.0, due - time.monotonic()))

    def _beat(self, is_due: bool) -> None:
        """One that comes early, for a receipt, is as light as can be: leases and limits have time until the next."""
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

    def _listen_on(self) -> None:
        store, hints = self._run.store, self._run.keys.control
        while not self._stopping.is_set():
            try:
                # a client of its own, which nobody else closes; in a cluster, another node may hold the run by now
                url = store.servers.url_of(hints)
                with (
                    open_client(url, name=f"{store.name}-hints", timeout_s=5.0) as client,
                    client.pubsub(ignore_subscribe_messages=False) as channel,
                ):
                    channel.subscribe(hints)
                    while not self._stopping.is_set():
                        self._pass_on(channel.get_message(timeout=LISTEN_S))
            except redis.RedisError:
                # deaf for a while: the heartbeat hears the same, only later
                self._stopping.wait(1.0)

    def _pass_on(self, message: Mapping[str, Any] | None) -> None:
        if message is None:
            return
        if message["type"] == "message":
            try:
                state = ControlState.parse_hint(message["data"])
            except ScriptError as error:
                log.warning("a hint that nobody can follow: %s", error)
            else:
                self._later(self._hint, state)
        else:
            # the answer to subscribe: subscribe first, then look, leaves no gap
            self.poke()
