"""Starts groups of one task: what was interrupted or expired first, then new prompts (XTuner's
name).

The reference takes one group at a time out of a pool, and loses it with its process. Here groups
only change places, in scripts that count the room for themselves (I3, I12).
"""

from __future__ import annotations

import logging
from itertools import islice

from buffer.batches.memory import MemoryUse
from buffer.control.progress import TaskProgress
from buffer.errors import ConfigError, PayloadMissing
from buffer.model import wire
from buffer.model.group import RolloutGroup
from buffer.model.ids import new_nonce
from buffer.run import Run
from producer_workers.producer.sampler import Sampler, TooLong
from producer_workers.producer.strategy import ProduceContext, ProducePlan

log = logging.getLogger("rolloutmq.producer")

Prompt = tuple[str, int, bytes]
"""gid, rollouts, INIT payload"""

PREPARED = 16
"""Prompts that are drawn ahead at a time, between two looks at the control state."""


class SamplerWithReplayBuffer:
    """The sampler of a task together with the task's pools. `slice_size` new prompts at a time, at
    most.
    """

    def __init__(self, run: Run, sampler: Sampler, *, slice_size: int = 64) -> None:
        self._run = run
        self._sampler = sampler
        self._slice_size = slice_size
        self.task = sampler.task
        self._cursor: int | None = None
        self._ahead: dict[int, Prompt] = {}

    def start(
        self, nonce: str, plan: ProducePlan, context: ProduceContext, memory: MemoryUse
    ) -> int:
        """Start what there is room for under the plan's target; how many groups. `nonce` is the
        producer's.

        Raises Fenced, StoreFull, and DatasetError for a row that cannot be used.
        """
        started = 0
        for status, at_least in plan.pools:
            if getattr(context.leftovers, status) >= at_least:
                started += self._run.jobs.reissue(
                    nonce, self.task, status, plan.target, at_least=at_least
                )
        room = context.room(plan.target) - started
        return started + self._draw(nonce, plan.target, room, context.progress, memory)

    def _draw(
        self, nonce: str, target: int | None, room: int, progress: TaskProgress, memory: MemoryUse
    ) -> int:
        room = min(room, self._slice_size)
        if room <= 0:
            return 0
        if memory.refuses(self._run.limits.tasks[self.task].lane):
            # the script decides; but prompts that it will refuse need not be drawn and stored
            room = 1
        cursor = self._run.jobs.next_draw(nonce, self.task) if progress.ahead else progress.cursor
        prompts = [self._prompt(cursor + i) for i in range(room)]
        if payloads := {gid: data for gid, _, data in prompts if data}:
            self._run.payloads.write_prompts(payloads)
        samples = [count for _, count, _ in prompts]
        try:
            done = self._run.jobs.enqueue(nonce, new_nonce(), self.task, cursor, samples, target)
        except PayloadMissing as error:
            log.warning("prompts expired before they were enqueued; drawing them again: %s", error)
            return 0
        self._cursor = done.cursor
        self._ahead = {draw: prompt for draw, prompt in self._ahead.items() if draw >= done.cursor}
        if skipped := sum(1 for count in samples[: done.cursor - cursor] if not count):
            log.warning(
                "%d prompts are too long and were passed over", skipped, extra={"task": self.task}
            )
        return done.count

    def _prompt(self, draw: int) -> Prompt:
        """A prompt that is ready to be stored; one that is too long has no rollouts, and nothing to
        store.
        """
        if draw not in self._ahead:
            gid = self._sampler.gid(draw)
            states = self._sampler.draw(draw)
            if isinstance(states, TooLong):
                self._ahead[draw] = (gid, 0, b"")
            else:
                self._ahead[draw] = (
                    gid,
                    len(states),
                    wire.encode(RolloutGroup(gid, self.task, states)),
                )
        return self._ahead[draw]

    def prepare(self) -> bool:
        """Draw some of what comes next, as long as nothing may be started: with new weights that
        must go fast, and a draw is a function of its number alone. Whether there is more to
        prepare.
        """
        if self._cursor is None or len(self._ahead) >= self._slice_size:
            return False
        missing = (
            n for n in range(self._cursor, self._cursor + self._slice_size) if n not in self._ahead
        )
        try:
            for draw in islice(missing, PREPARED):
                self._prompt(draw)
        except ConfigError as error:
            # told when its turn comes, if it does
            log.debug("not drawn ahead: %s", error)
            return False
        return len(self._ahead) < self._slice_size
