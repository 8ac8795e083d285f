"""Run producer and worker of a trial in one loop, through the real scripts.

As a program: `python -m benchmarks.learning.fleet URL RUN MODEL K BATCH SEED`, until the run is
finished.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch

from benchmarks.learning.sampler import Sampler
from buffer.control.control import ControlState, Mode
from buffer.control.worker_record import HeartbeatReport, WorkerState
from buffer.ids import group_id, new_nonce
from buffer.job import Job
from buffer.redis.store import Store
from buffer.run.open import wait_for_run
from buffer.run.run import Run
from buffer.wire import group_bytes
from buffer.wire.group import RolloutGroup
from buffer.wire.rollout import PolicyVersion
from producer_workers.producer.strategy import contexts

TASK = "sums"
AT_ONCE = 8
"""Groups of one claim: between two of them it hears of new weights."""
SWEEP_S = 1.0
"""Between two sweeps of the janitor: nobody else is there to make one."""
IDLE_S = 0.01
"""Between two questions whether there is anything to do."""


class Fleet:
    """One worker, and the producer that keeps it busy as far ahead as staleness allows."""

    def __init__(self, run: Run, sampler: Sampler, k: int, batch: int) -> None:
        self._run = run
        self._sampler = sampler
        self._k = k
        self._batch = batch
        self._producer = new_nonce()
        self._nonce = new_nonce()
        self._loaded = PolicyVersion("", -1)
        self._swept = self.busy_s = 0.0
        run.control.open_producer(self._producer, take_over=True)
        run.fleet.register("w0", self._nonce, {"engine": "benchmark"})

    def turn(self) -> bool:
        """One round; whether anything was sampled."""
        state = self._run.control.state()
        self._sweep()
        pulse = HeartbeatReport(state.epoch, state.weights, WorkerState.IDLE)
        held = self._held_groups()
        self._run.fleet.heartbeat("w0", self._nonce, pulse, list(held), held)
        self._run.control.renew_role("producer", self._producer)
        if state.mode is not Mode.RUN:
            return False
        if state.weights != self._loaded:
            self._sampler.load(Path(state.weights_path))
            self._loaded = state.weights
        made = self._sample(state)
        for job, group in made:
            self._submit(job, group)
        return bool(made)

    def serve(self) -> None:
        """Work until the run is finished; `busy_s` counts the processor time of making groups."""
        while self._run.control.state().mode is not Mode.FINISH:
            used = time.thread_time()
            if self.turn():
                self.busy_s += time.thread_time() - used
            else:
                time.sleep(IDLE_S)

    def _held_groups(self) -> Mapping[Job, PolicyVersion]:
        """Return what is not submitted between two turns, with the weights that sampled it."""
        return {}

    def _sample(self, state: ControlState) -> list[tuple[Job, RolloutGroup]]:
        """Start what these weights can still serve, and return the next groups with responses."""
        limits = self._run.limits
        ahead = limits.ahead_threshold or limits.stale_threshold
        self._produce(state, (state.weights.version + ahead) * self._batch)
        jobs = self._run.jobs.claim("w0", self._nonce, new_nonce(), state.weights, AT_ONCE).jobs
        prompts = [self._run.buffer.read(job.prompt) for job in jobs]
        return list(zip(jobs, self._sampler.answer(prompts, state.weights), strict=True))

    def _submit(self, job: Job, group: RolloutGroup) -> None:
        self._run.buffer.submit("w0", job, group, int(group.lengths.sum()))

    def _sweep(self) -> None:
        if time.monotonic() > self._swept + SWEEP_S:
            self._run.janitor.sweep()
            self._swept = time.monotonic()

    def _produce(self, state: ControlState, target: int) -> None:
        jobs = self._run.jobs
        cursor = self._run.jobs.cursor(TASK)
        context = contexts(self._run.limits, state, self._run.read_progress([TASK]))[TASK]
        target = min(target, self._run.limits.steps * self._batch)
        room = min(AT_ONCE, context.room(target))
        if room > 0:
            gids = [group_id(TASK, cursor + place) for place in range(room)]
            self._run.payloads.write_prompts(
                {gid: group_bytes.encode(self._sampler.prompt(gid)) for gid in gids}
            )
            jobs.enqueue(self._producer, new_nonce(), TASK, cursor, [self._k] * room, target)


@contextmanager
def serving(run: Run, fleet: Fleet) -> Iterator[None]:
    """Let a thread serve for the block. Raises what ended the fleet."""
    with ThreadPoolExecutor(1) as pool:
        served = pool.submit(fleet.serve)
        try:
            yield
        finally:
            run.control.set_mode("operator", Mode.FINISH)
            served.result()


def main(url: str, name: str, model: str, k: str, batch: str, seed: str) -> None:
    torch.set_num_threads(1)
    run = wait_for_run(Store(url), name)
    Fleet(run, Sampler(Path(model), int(k), int(seed)), int(k), int(batch)).serve()


if __name__ == "__main__":
    main(*sys.argv[1:])
