"""The producer: decides what is generated next, and keeps nothing that Redis does not hold (I3, I7).

One is active at a time; killing it at any moment costs nothing. Each round: expire what is too old, take back
what silent workers held, let aborted and expired groups wait again, then draw new prompts, all within the room that
the scripts compute for themselves.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence

from buffer import wire
from buffer.control import ControlState, Mode, new_nonce
from buffer.errors import PayloadMissing, StoreFull
from buffer.group import RolloutGroup
from buffer.memory import MemoryUse
from buffer.rollout import RolloutState
from buffer.run import Run
from producer_workers.said_once import SaidOnce
from producer_workers.sampler import Sampler, TooLong
from producer_workers.strategy import ProduceStrategy

log = logging.getLogger("rolloutmq.producer")

ROUND_S = 1.0
"""A round runs at least so often: leases run out, and bells can be lost. More often where leases are short: a
pause of half a lease between two looks would count as an outage, in which nobody is reaped."""


EVERY_POOL = (("expired", 1), ("aborted", 1))
"""What of an evaluation is started again: all that there is."""


class Producer:
    """The active producer of a run. `samplers` by task; `strategies` by training task: how many groups of an
    evaluation are wanted is for the trainer to say. `slice_size` groups per enqueue at most."""

    def __init__(
        self,
        run: Run,
        samplers: Mapping[str, Sampler],
        strategies: Mapping[str, ProduceStrategy],
        *,
        slice_size: int = 64,
    ) -> None:
        self._run, self._samplers, self._strategies = run, samplers, strategies
        self._slice_size = slice_size
        self._memory, self._refusal = MemoryUse(0, 0, 0), SaidOnce(log, "nothing new for now")
        self._stopped: set[str] = set()
        self.nonce = new_nonce()

    def run(self, stop: threading.Event, *, take_over: bool = False) -> None:
        """Produce until `stop` is set or the run is finished. Raises RoleHeld, Fenced, LostRun."""
        self._run.control.open_producer(self.nonce, run_nonce=self._run.nonce, take_over=take_over)
        round_s = min(ROUND_S, self._run.limits.lease_ms / 4000)
        sweep_at = time.monotonic()
        log.info("producing", extra={"run": self._run.name, "tasks": list(self._samplers)})
        while not stop.is_set():
            state = self._run.control.beat("producer", self.nonce)
            if state.mode is Mode.FINISH:
                break
            # rung at every result: what falls due by the clock can wait for the next second
            is_due = time.monotonic() >= sweep_at
            if is_due:
                sweep_at = time.monotonic() + round_s
            if not self.round(state, sweep=is_due):
                self._run.store.wait_bell(self._run.keys.bell("producer"), round_s)
        self._run.control.beat("producer", self.nonce, closing=True)

    def round(self, state: ControlState, *, sweep: bool = True) -> int:
        """One look at everything; returns how many groups were started."""
        self._run.refresh_limits()
        if sweep:
            self._run.janitor.sweep()
        self._look_at_memory()
        try:
            started = sum(self._produce(task, state) for task in self._samplers)
        except StoreFull as error:
            # the next round frees what it can, and tries again
            self._refusal.say(str(error))
            return 0
        self._refusal.say("")
        return started

    def _look_at_memory(self) -> None:
        before, self._memory = self._memory, self._run.memory.use()
        if self._memory.refuses_fresh != before.refuses_fresh:
            word = "no new prompts for now" if self._memory.refuses_fresh else "new prompts again"
            log.warning("%s: the run holds %s", word, self._memory)

    def _produce(self, task: str, state: ControlState) -> int:
        if self._run.limits.tasks[task].lane not in state.lanes:
            return 0
        if self._is_stopped(task):
            return 0
        strategy = self._strategies.get(task)
        target = strategy.target(state.weights.version) if strategy else None
        started = 0
        for status, at_least in strategy.reissue_from() if strategy else EVERY_POOL:
            started += self._run.jobs.reissue(self.nonce, task, status, target, at_least=at_least)
        return started + self._draw(task, target)

    def _is_stopped(self, task: str) -> bool:
        """The scripts refuse anyway; this says so, once."""
        failures, stopped = self._run.jobs.failures(task)
        if stopped and task not in self._stopped:
            hint = f"`rolloutmq dead` says why; then `rolloutmq continue --task {task}`"
            log.error("task %s is stopped: %d tries failed or were filtered in a row; %s", task, failures, hint)
        (self._stopped.add if stopped else self._stopped.discard)(task)
        return stopped

    def _draw(self, task: str, target: int | None) -> int:
        room = min(self._run.jobs.room(task, target), self._slice_size)
        if room <= 0:
            return 0
        if self._memory.refuses(self._run.limits.tasks[task].lane):
            # the script decides; but prompts that it will refuse need not be drawn and stored
            room = 1
        cursor = self._run.jobs.next_draw(self.nonce, task)
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
