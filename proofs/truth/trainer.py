"""The trainers of the truth test: they take, hold, train, evaluate, publish and die as a case says."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

from buffer.ledger.position import Position
from buffer.wire.group import RolloutGroup
from consumer.handle.async_consumer import AsyncRolloutConsumer
from consumer.handle.batch import Batch
from consumer.handle.rollout_consumer import RolloutConsumer
from proofs.truth.loss_witness import LossWitness
from proofs.truth.ranks import train_on_ranks
from proofs.truth.world import DEADLINE_S, EXAM, TASK, World, publish

EXAM_STEP = 1_000_000
"""Evaluations are written down as steps of their own, behind it."""


class TruthTrainer:
    """A trainer of one process. `steps` trains one step at a time, so that two can take turns."""

    def __init__(self, world: World, model_dir: Path) -> None:
        self._world = world
        self._case = world.case
        self._loss = LossWitness(model_dir, world.history.note, updates=world.case.updates)
        self._position = Position(run=world.run.name, run_nonce=world.run.nonce)
        self._saved = self._position.model_dump_json()
        self._held: deque[Batch] = deque()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._open()

    def _open(self) -> None:
        position = Position.model_validate_json(self._saved)
        run, ahead = self._world.run, self._case.prefetch_bytes
        self._asynchronous: AsyncRolloutConsumer | None = None
        if self._case.is_async:
            self._asynchronous = AsyncRolloutConsumer(run, prefetch_bytes=ahead)
            self._consumer: RolloutConsumer = self._asynchronous.blocking
            self._awaited(self._asynchronous.open(position=position, take_over=True))
        else:
            self._consumer = RolloutConsumer(run, prefetch_bytes=ahead)
            self._consumer.open(position=position, take_over=True)
        self._position = position

    def _awaited(self, call: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(call, self._loop).result(DEADLINE_S)

    def steps(self) -> Iterator[int]:
        dies_after = self._case.restart_after
        step = 1
        while step <= self._case.steps:
            self._held.append(self._take(step))
            yield step
            self._evaluate(step)
            self._read_ahead(step)
            while len(self._held) > self._case.held:
                self._train(self._held.popleft())
            if step == dies_after:
                dies_after = 0
                # a batch that is held was used, but not committed
                for batch in self._held:
                    self._loss.fit(batch.step, batch.groups)
                self._restart()
                step = self._position.step
            step += 1
        while self._held:
            self._train(self._held.popleft())

    def close(self) -> None:
        """Give up the role."""
        self._consumer.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _take(self, step: int) -> Batch:
        counts = {TASK: self._case.batch}
        if self._asynchronous:
            batch: Batch = self._awaited(
                self._asynchronous.take_batch(step, counts, deadline_s=DEADLINE_S)
            )
            return batch
        return self._consumer.take_batch(step, counts, deadline_s=DEADLINE_S)

    def _evaluate(self, step: int) -> None:
        if not self._case.evaluates:
            return
        pending = self._consumer.begin_evaluation(EXAM, self._case.evaluates)
        found: list[RolloutGroup] = []

        def is_there() -> bool:
            found.extend(pending.poll() or ())
            return bool(found)

        self._world.until(is_there)
        self._loss.look(EXAM_STEP + step, found)

    def _read_ahead(self, step: int) -> None:
        if self._case.prefetch_bytes and step < self._case.steps:
            room = min(self._case.batch, self._case.prefetch_bytes // self._case.group_bytes[1])
            self._world.until(lambda: self._world.run.buffer.count(TASK) >= self._case.batch)
            before = self._consumer._prefetcher
            self._world.until(lambda: before.held_bytes >= room * self._case.group_bytes[0] // 2)

    def _train(self, batch: Batch) -> None:
        self._loss.fit(batch.step, batch.groups)
        self._position.add(batch.manifest)
        self._saved = self._position.model_dump_json()
        self._consumer.commit(batch.step, keep=batch.step)
        if batch.step < self._case.steps:
            publish(self._consumer, self._world.folder, batch.step)

    def _restart(self) -> None:
        """Die without a word to the server, and come back from the last checkpoint."""
        self._held.clear()
        self._consumer.role.ended.set()
        self._consumer._prefetcher.close()
        self._open()


def train(world: World, model_dir: Path) -> None:
    if world.case.ranks > 1:
        train_on_ranks(world, model_dir)
        return
    trainer = TruthTrainer(world, model_dir)
    try:
        for _ in trainer.steps():
            world.check()
    finally:
        trainer.close()


def train_in_turns(worlds: list[World], model_dir: Path) -> None:
    """Train several runs in one process: each takes a batch before any uses its own."""
    trainers = [TruthTrainer(world, model_dir) for world in worlds]
    try:
        turns = [trainer.steps() for trainer in trainers]
        while turns:
            turns = [steps for steps in turns if next(steps, 0)]
    finally:
        for trainer in trainers:
            trainer.close()
