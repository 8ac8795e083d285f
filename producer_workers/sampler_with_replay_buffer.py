"""Starts groups of one task: what was interrupted or expired first, then new prompts (XTuner's name).

The reference takes one group at a time out of a pool, and loses it with its process. Here groups only change
places, in scripts that count the room for themselves (I3, I12).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from buffer import wire
from buffer.control import new_nonce
from buffer.errors import PayloadMissing
from buffer.group import RolloutGroup
from buffer.memory import MemoryUse
from buffer.progress import Leftovers
from buffer.rollout import RolloutState
from buffer.run import Run
from producer_workers.produce_context import ProducePlan
from producer_workers.sampler import Sampler, TooLong

log = logging.getLogger("rolloutmq.producer")


class SamplerWithReplayBuffer:
    """The sampler of a task together with the task's pools. `slice_size` new prompts at a time, at most."""

    def __init__(self, run: Run, sampler: Sampler, *, slice_size: int = 64) -> None:
        self._run, self._sampler, self._slice_size = run, sampler, slice_size
        self.task = sampler.task

    def start(self, nonce: str, plan: ProducePlan, leftovers: Leftovers, memory: MemoryUse) -> int:
        """Start what there is room for under the plan's target; how many groups. `nonce` is the producer's.

        Raises Fenced, StoreFull, and DatasetError for a row that cannot be used.
        """
        started = 0
        for status, at_least in plan.pools:
            if getattr(leftovers, status) >= at_least:
                started += self._run.jobs.reissue(nonce, self.task, status, plan.target, at_least=at_least)
        return started + self._draw(nonce, plan.target, memory)

    def _draw(self, nonce: str, target: int | None, memory: MemoryUse) -> int:
        room = min(self._run.jobs.room(self.task, target), self._slice_size)
        if room <= 0:
            return 0
        if memory.refuses(self._run.limits.tasks[self.task].lane):
            # the script decides; but prompts that it will refuse need not be drawn and stored
            room = 1
        cursor = self._run.jobs.next_draw(nonce, self.task)
        groups = [self._sampler.draw(cursor + i) for i in range(room)]
        self._store_prompts(cursor, groups)
        samples = [0 if isinstance(states, TooLong) else len(states) for states in groups]
        try:
            done = self._run.jobs.enqueue(nonce, new_nonce(), self.task, cursor, samples, target)
        except PayloadMissing as error:
            log.warning("prompts expired before they were enqueued; drawing them again: %s", error)
            return 0
        if skipped := sum(1 for count in samples[: done.cursor - cursor] if not count):
            log.warning("%d prompts are too long and were passed over", skipped, extra={"task": self.task})
        return done.count

    def _store_prompts(self, cursor: int, groups: Sequence[list[RolloutState] | TooLong]) -> None:
        payloads = {}
        for place, states in enumerate(groups):
            if not isinstance(states, TooLong):
                gid = self._sampler.gid(cursor + place)
                payloads[gid] = wire.encode(RolloutGroup(gid, self.task, states))
        if payloads:
            self._run.payloads.write_prompts(payloads)
