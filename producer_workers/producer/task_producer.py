"""Starts the groups of one task: interrupted and expired ones first, then new prompts (I3, I12)."""

from __future__ import annotations

import logging
import time
from itertools import islice

from buffer.control.control import Work
from buffer.errors import ConfigError, PayloadMissing
from buffer.ids import new_nonce
from buffer.ledger.memory import MemoryUse
from buffer.redis.bounds import BYTES_PER_VALUE
from buffer.run.run import Run
from producer_workers.producer.sampler import Sampler, TooLong
from producer_workers.producer.strategy import ProduceContext, ProducePlan

log = logging.getLogger("rolloutmq.producer")

Prompt = tuple[str, int, bytes]  # gid, rollouts, INIT payload

DRAW_S = 1.0  # groups of a slow data set start after this time, with the prompts drawn until then

PREPARED = 16  # prompts drawn ahead between two polls of the control state


class TaskProducer:
    """A task's sampler and pools (the reference's SamplerWithReplayBuffer).

    `slice_size`: new prompts in one enqueue, at most.
    """

    def __init__(
        self, run: Run, sampler: Sampler, *, slice_size: int = 64, work: Work | None = None
    ) -> None:
        self._run = run
        self._sampler = sampler
        self._slice_size = slice_size
        self._work = work or Work()
        self.task = sampler.task
        self._cursor: int | None = None
        self._ahead: dict[int, Prompt] = {}

    def start(
        self, nonce: str, plan: ProducePlan, context: ProduceContext, memory: MemoryUse
    ) -> int:
        """Start as many groups as the plan's target has room for, and return how many.

        `nonce`: of the producer. Raises Fenced, StoreFull, and DatasetError for an unusable row.
        """
        started = 0
        for status, at_least in plan.pools:
            if getattr(context.leftovers, status) >= at_least:
                started += self._run.jobs.reissue(
                    nonce,
                    self.task,
                    status,
                    plan.target,
                    at_least=at_least,
                    tail_step=plan.tail_step if status == "expired" else None,
                )
        room = min(context.room(plan.target, started), self._slice_size)
        if room <= 0:
            return started
        if memory.refuses(self._run.limits.tasks[self.task].lane):
            # the script decides; but it would refuse most of what is drawn and stored for it
            room = 1
        cursor = context.progress.cursor
        if context.progress.reentered:
            cursor = self._run.jobs.next_draw(nonce, self.task)
        prompts = self._prompts(cursor, room)
        if payloads := {gid: data for gid, _, data in prompts if data}:
            self._run.payloads.write_prompts(payloads)
        samples = [count for _, count, _ in prompts]
        try:
            done = self._run.jobs.enqueue(
                nonce, new_nonce(), self.task, cursor, samples, plan.target
            )
        except PayloadMissing as error:
            log.warning("prompts expired before they were enqueued; drawing them again: %s", error)
            return started
        self._cursor = done.cursor
        self._ahead = {draw: prompt for draw, prompt in self._ahead.items() if draw >= done.cursor}
        if skipped := samples[: done.cursor - cursor].count(0):
            log.warning("skipped %d prompts that are too large", skipped, extra={"task": self.task})
        return started + done.count

    def _prompts(self, cursor: int, room: int) -> list[Prompt]:
        """Return the next prompts: `room` of them, or those drawn within DRAW_S."""
        until_s = time.monotonic() + DRAW_S
        prompts = [self._prompt(cursor)]
        while len(prompts) < room and time.monotonic() < until_s:
            prompts.append(self._prompt(cursor + len(prompts)))
        return prompts

    def _prompt(self, draw: int) -> Prompt:
        """Return a prompt that is ready to be stored; one that is too large has no rollouts."""
        if draw not in self._ahead:
            gid = self._sampler.gid(draw)
            with self._work.on(f"draws prompt {draw} of task {self.task}"):
                states = self._sampler.draw(draw)
            if isinstance(states, TooLong):
                self._ahead[draw] = (gid, 0, b"")
            else:
                payload = self._sampler.encode(draw, states)
                self._ahead[draw] = (gid, len(states), payload)
                if not self._run.payloads.fits(payload):
                    log.warning(
                        "task %s: row %d is skipped: its prompt has %d bytes, and at most %d can "
                        "be stored",
                        self.task,
                        self._sampler.place(draw).row,
                        len(payload),
                        BYTES_PER_VALUE,
                    )
                    self._ahead[draw] = (gid, 0, b"")
        return self._ahead[draw]

    def prepare(self) -> bool:
        """Draw some prompts early, for new weights; return whether more are missing."""
        if self._cursor is None or len(self._ahead) >= self._slice_size:
            return False
        wanted = range(self._cursor, self._cursor + self._slice_size)
        missing = (draw for draw in wanted if draw not in self._ahead)
        try:
            until_s = time.monotonic() + DRAW_S
            for draw in islice(missing, PREPARED):
                self._prompt(draw)
                if time.monotonic() > until_s:
                    break
        except ConfigError as error:
            # raised again when this prompt is due, if it ever is
            log.debug("not drawn ahead: %s", error)
            return False
        return len(self._ahead) < self._slice_size
