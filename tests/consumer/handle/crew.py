"""A producer and a worker in threads: prepared groups, submitted by the real scripts.

They depend on the draw alone, so that two runs get the same groups whatever happens in between.
"""

from __future__ import annotations

import threading
from collections.abc import Container, Iterator
from contextlib import contextmanager
from itertools import count

import numpy as np

from buffer.control.control import ControlState, Mode
from buffer.control.length_counts import FINISHED, LengthCounts
from buffer.control.worker_record import HeartbeatReport, WorkerState
from buffer.ids import group_id, new_nonce, split_group_id
from buffer.job import Job
from buffer.run.run import Run
from buffer.wire import group_bytes
from buffer.wire.group import RolloutGroup
from buffer.wire.rollout import PolicyVersion, RolloutState, Status, VersionSpan
from producer_workers.producer.strategy import contexts

PROMPT = 6
MEMBERS = 4
SWEEP_EVERY = 5
"""Turns: a sweep takes as many round trips as all else in a turn."""


def prompt(gid: str) -> bytes:
    """Return an INIT payload of 4 rollouts."""
    draw = np.random.default_rng(split_group_id(gid)[1])
    ids = draw.integers(6, 90, PROMPT)
    states = [RolloutState(index=i, prompt_ids=ids, messages=[]) for i in range(MEMBERS)]
    return group_bytes.encode(RolloutGroup(gid, split_group_id(gid)[0], states))


def answer(group: RolloutGroup, weights: PolicyVersion) -> RolloutGroup:
    """Return the group with random tokens, and scores 0, 1, 0, 1."""
    draw = np.random.default_rng(split_group_id(group.gid)[1] + 10_000)
    for position, state in enumerate(group.states):
        length = int(draw.integers(1, 6))
        span = VersionSpan(0, length, weights.version, weights.lineage)
        state.append(
            draw.integers(6, 90, length).astype("<i4"),
            draw.uniform(-5, -3, length).astype("<f4"),
            [span],
        )
        state.status = Status.COMPLETED
        state.finish_reason = "stop"
        state.reward = {"score": float(position % 2)}
    return group.continued(group.states)


class Crew:
    """Serves `run` until `stop`.

    `targets`: groups of each training task in total; evaluations set their own. `silent`: sends no
    receipts. `stamp`: the version of the weights of all tokens; default: the newest.
    """

    fails: Container[str] = ()
    """Groups of which every try fails."""
    skips: Container[str] = ()

    def __init__(
        self, run: Run, targets: dict[str, int], *, silent: bool = False, stamp: int | None = None
    ) -> None:
        self._run = run
        self._targets = targets
        self.silent = silent
        self._stamp = stamp
        self.producer = new_nonce()
        self._nonce = new_nonce()
        self.worker = "w0"
        self._lengths = LengthCounts()
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self.epochs: list[tuple[int, Mode]] = []
        self.claimed: list[tuple[str, Mode]] = []

    def start(self) -> None:
        self.register()
        self._thread.start()

    def register(self) -> None:
        self._run.control.open_producer(self.producer, take_over=True)
        self._run.fleet.register(self.worker, self._nonce, {"engine": "prepared"})

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()
        if self._error:
            raise self._error

    def serve(self) -> None:
        """Until `stop`, in this thread."""
        turns = count()
        while not self._stop.wait(0.01):
            if next(turns) % SWEEP_EVERY == 0:
                self._run.janitor.sweep()
            self._turn()

    def _serve(self) -> None:
        try:
            self.serve()
        except BaseException as error:
            self._error = error

    def _turn(self) -> None:
        state = self._run.control.state()
        self.produce(*self._run.limits.tasks, state=state)
        if state.lanes:
            for job in self._claim(state):
                self.claimed.append((job.lane, state.mode))
                if job.gid in self.skips:
                    self._run.jobs.release(self.worker, job, "skipped", "no page")
                    continue
                if job.gid in self.fails:
                    self._run.jobs.release(self.worker, job, "failed", "ValueError: no")
                    continue
                group = answer(self._run.buffer.read(job.payload), self._weights(job, state))
                self._run.buffer.submit(self.worker, job, group, 1)
                self._lengths.add(job.task, FINISHED, group.lengths)
        if not self.silent:
            # before the heartbeat, which is the receipt that a test may wait for
            self.epochs.append((state.epoch, state.mode))
            text = self._lengths.text()
            pulse = HeartbeatReport(state.epoch, state.weights, WorkerState.IDLE, lengths=text)
            if not self._run.fleet.heartbeat(self.worker, self._nonce, pulse, []).known:
                self._run.fleet.register(self.worker, self._nonce, {"engine": "prepared"})

    def _weights(self, job: Job, state: ControlState) -> PolicyVersion:
        if self._stamp is None or job.lane == "eval":
            return state.weights
        return PolicyVersion("initial", self._stamp)

    def produce(self, *tasks: str, state: ControlState | None = None) -> None:
        progress = self._run.read_progress(tasks)
        found = contexts(self._run.limits, state or self._run.control.state(), progress)
        for task, context in found.items():
            target = self._targets.get(task)
            room = min(64, context.room(target))
            if room > 0:
                self._enqueue(task, room, target)

    def _enqueue(self, task: str, room: int, target: int | None) -> None:
        jobs = self._run.jobs
        cursor = jobs.cursor(task)
        self._run.payloads.write_prompts(
            {g: prompt(g) for g in (group_id(task, cursor + i) for i in range(room))}
        )
        jobs.enqueue(self.producer, new_nonce(), task, cursor, [MEMBERS] * room, target)

    def _claim(self, state: ControlState) -> list[Job]:
        return self._run.jobs.claim(self.worker, self._nonce, new_nonce(), state.weights, 64).jobs


@contextmanager
def at_work(
    run: Run,
    *,
    silent: bool = False,
    stamp: int | None = None,
    fails: Container[str] = (),
    skips: Container[str] = (),
    **targets: int,
) -> Iterator[Crew]:
    """Run a crew during the test, and raise its failure in the test."""
    crew = Crew(run, targets, silent=silent, stamp=stamp)
    crew.fails, crew.skips = fails, skips
    crew.start()
    try:
        yield crew
    finally:
        crew.stop()
