"""Producer and worker of a trial in one loop: it claims, samples and submits through the real scripts.

As a program: `python -m benchmarks.learning.fleet URL RUN MODEL K BATCH SEED`, until the run is finished.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch

from benchmarks.learning.sampler import Sampler
from buffer import Mode, PolicyVersion, Pulse, Run, Store, group_id, new_nonce, wire
from buffer.open_run import wait_for_run

TASK = "sums"
AT_ONCE = 4
"""Groups of one claim: between two of them it hears of new weights."""


class Fleet:
    """One worker, and the producer that keeps it busy as far ahead as staleness allows."""

    def __init__(self, run: Run, sampler: Sampler, k: int, batch: int) -> None:
        self._run, self._sampler, self._k, self._batch = run, sampler, k, batch
        self._producer, self._nonce, self._loaded = new_nonce(), new_nonce(), PolicyVersion("", -1)
        run.control.open_producer(self._producer, take_over=True)
        run.fleet.register("w0", self._nonce, {"engine": "benchmark"})

    def turn(self) -> bool:
        """One round; whether anything was sampled."""
        state = self._run.control.state()
        self._run.janitor.sweep()
        pulse = Pulse(state.epoch, state.weights, "ready", 0.0, 0)
        self._run.fleet.heartbeat("w0", self._nonce, pulse, [])
        self._run.control.beat("producer", self._producer)
        if state.mode is not Mode.RUN:
            return False
        if state.weights != self._loaded:
            self._sampler.load(Path(state.weights_path))
            self._loaded = state.weights
        # what these weights can still serve: steps up to M + threshold
        self._produce((state.weights.version + self._run.limits.stale_threshold) * self._batch)
        jobs = self._run.jobs.claim("w0", self._nonce, new_nonce(), state.weights, AT_ONCE).jobs
        for job in jobs:
            group = self._sampler.answer(self._run.buffer.read(job.payload), state.weights)
            self._run.buffer.submit("w0", job, group, int(group.lengths.sum()))
        return bool(jobs)

    def _produce(self, target: int) -> None:
        jobs, cursor = self._run.jobs, self._run.jobs.cursor(TASK)
        room = min(AT_ONCE, jobs.room(TASK, target), self._run.limits.steps * self._batch - cursor)
        if room > 0:
            gids = [group_id(TASK, cursor + place) for place in range(room)]
            self._run.payloads.write_prompts({gid: wire.encode(self._sampler.prompt(gid)) for gid in gids})
            jobs.enqueue(self._producer, new_nonce(), TASK, cursor, [self._k] * room, target)


def main(url: str, name: str, model: str, k: str, batch: str, seed: str) -> None:
    torch.set_num_threads(1)
    run = wait_for_run(Store(url), name)
    fleet = Fleet(run, Sampler(Path(model), int(k), int(seed)), int(k), int(batch))
    while run.control.state().mode is not Mode.FINISH:
        if not fleet.turn():
            time.sleep(0.005)


if __name__ == "__main__":
    main(*sys.argv[1:])
