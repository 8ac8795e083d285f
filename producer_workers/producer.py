"""The producer: decides what is generated next, and keeps nothing that Redis does not hold (I3, I7).

One is active at a time; killing it at any moment costs nothing. Each round: expire what is too old, take back
what silent workers held, let aborted and expired groups wait again, then draw new prompts, all within the room that
the scripts compute for themselves.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence

from buffer import wire
from buffer.control import ControlState, Mode, new_nonce
from buffer.errors import PayloadMissing
from buffer.group import RolloutGroup
from buffer.rollout import RolloutState
from buffer.run import Run
from producer_workers.sampler import Sampler, TooLong
from producer_workers.strategy import AsyncProduceStrategy

log = logging.getLogger("rolloutmq.producer")

ROUND_S = 1.0
"""A round runs at least so often: leases run out, and bells can be lost. More often where leases are short: a
pause of half a lease between two looks would count as an outage, in which nobody is reaped."""


class Producer:
    """The active producer of a run. `samplers` by task; `slice_size` groups per enqueue at most."""

    def __init__(
        self, run: Run, samplers: Mapping[str, Sampler], strategy: AsyncProduceStrategy, *, slice_size: int = 64
    ) -> None:
        self._run, self._samplers, self._strategy = run, samplers, strategy
        self._slice_size = slice_size
        self.nonce = new_nonce()

    def run(self, stop: threading.Event, *, take_over: bool = False) -> None:
        """Produce until `stop` is set or the run is finished. Raises RoleHeld, Fenced, LostRun."""
        self._run.control.open_producer(self.nonce, run_nonce=self._run.nonce, take_over=take_over)
        round_s = min(ROUND_S, self._run.limits.lease_ms / 4000)
        log.info("producing", extra={"run": self._run.name, "shares": self._strategy.shares})
        while not stop.is_set():
            state = self._run.control.beat("producer", self.nonce)
            if state.mode is Mode.FINISH:
                break
            if not self.round(state):
                self._run.store.wait_bell(self._run.keys.bell("producer"), round_s)
        self._run.control.beat("producer", self.nonce, closing=True)

    def round(self, state: ControlState) -> int:
        """One look at everything; returns how many groups were started."""
        self._run.tidy()
        return sum(self._produce(task, state) for task in self._samplers)

    def _produce(self, task: str, state: ControlState) -> int:
        limits = self._run.limits
        if limits.tasks[task].lane not in state.lanes:
            return 0
        target = None
        if limits.tasks[task].eval_of is None:
            target = self._strategy.target(task, state.weights.version)
        started = 0
        for status, at_least in self._strategy.reissue_from(limits):
            started += self._run.jobs.reissue(self.nonce, task, status, target, at_least=at_least)
        return started + self._draw(task, target)

    def _draw(self, task: str, target: int | None) -> int:
        room = min(self._run.jobs.room(task, target), self._slice_size)
        if room <= 0:
            return 0
        cursor = self._run.jobs.cursor(task)
        groups = [self._samplers[task].draw(cursor + i) for i in range(room)]
        self._store_prompts(task, cursor, groups)
        samples = [0 if isinstance(states, TooLong) else len(states) for states in groups]
        try:
            done = self._run.jobs.enqueue(self.nonce, new_nonce(), task, cursor, samples, target)
        except PayloadMissing as error:
            log.warning("prompts expired before they were enqueued; drawing them again: %s", error)
            return 0
        if skipped := sum(1 for count in samples[: done.cursor - cursor] if not count):
            log.warning("%d prompts are too long and were passed over", skipped, extra={"task": task})
        return done.count

    def _store_prompts(self, task: str, cursor: int, groups: Sequence[list[RolloutState] | TooLong]) -> None:
        payloads = {}
        for place, states in enumerate(groups):
            if not isinstance(states, TooLong):
                gid = self._samplers[task].gid(cursor + place)
                payloads[gid] = wire.encode(RolloutGroup(gid, task, states))
        if payloads:
            self._run.payloads.write_prompts(payloads)
