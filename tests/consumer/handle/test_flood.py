"""Workers submit garbage as fast as they can.

The trainer continues with whole batches, and they are barred.
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from buffer.ledger.ledger import BAD_GROUPS
from buffer.redis.store import Store
from buffer.run import Run
from rolloutmq.views.diagnosis import diagnose
from rolloutmq.views.run_view import read_run_view
from tests.consumer.conftest import Trainers
from tests.consumer.handle.crew import Crew, at_work, wait_until
from tests.rolloutmq.conftest import ROOT

BATCH = 8
STEPS = 3
TARGET = 24
LONG = {"lease_ms": 60_000, "worker_timeout_ms": 600_000, "role_timeout_ms": 60_000}


@contextmanager
def flooding(store: Store, run: Run, *workers: str) -> Iterator[None]:
    """Start processes that spoil all of the first TARGET groups before the block, and continue."""
    url = store.servers.masters()[0][0]
    floods = list[subprocess.Popen[bytes]]()
    try:
        for seed, worker in enumerate(workers):
            program = [
                sys.executable,
                "-m",
                "tests.consumer.handle.flood",
                url,
                run.name,
                worker,
                str(seed),
            ]
            floods.append(subprocess.Popen(program, cwd=ROOT))
        wait_until(lambda: len(run.fleet.workers()) == len(workers), "all have joined")
        crew = Crew(run, {"math": TARGET})
        run.control.open_producer(crew.producer)
        crew.produce("math")
        wait_until(lambda: run.buffer.count("math") == TARGET, "the pool is full of garbage")
        yield
        assert all(flood.poll() is None for flood in floods)
    finally:
        for flood in floods:
            flood.kill()
            flood.wait()


@pytest.mark.parametrize("workers", [("f0",), ("f0", "f1")], ids=["one", "two"])
def test_floods_of_garbage_are_contained(
    store: Store, make_run: Callable[..., Run], trainer: Trainers, workers: tuple[str, ...]
) -> None:
    run = make_run(batch_size=BATCH, steps=STEPS, **LONG)
    consumer = trainer(run)
    gids = set[str]()
    with flooding(store, run, *workers), at_work(run, math=TARGET):
        for step in range(1, STEPS + 1):
            batch = consumer.take_batch(step, {"math": BATCH}, deadline_s=400.0)
            assert [len(group.scores) for group in batch.groups] == [4] * BATCH
            assert gids.isdisjoint(batch.manifest.gids)
            assert consumer.take_batch(step, {"math": BATCH}).manifest == batch.manifest  # I5
            consumer.commit(step, keep=step)
            gids |= set(batch.manifest.gids)
    letters = list(run.dead_letters.newest())
    assert len(letters) >= TARGET
    assert {letter.worker for letter in letters} <= set(workers)
    barred = {worker.id for worker in run.fleet.workers() if worker.is_barred}
    counted = Counter(letter.worker for letter in letters)
    assert barred == {worker for worker, bad in counted.items() if bad >= BAD_GROUPS} != set()
    found = [
        fields["worker"]
        for _, (_, name, fields) in run.events.read(limit=9000)
        if name == "worker_barred"
    ]
    assert sorted(found) == sorted(barred)
    symptoms = "\n".join(symptom.what for symptom in diagnose(read_run_view(run)))
    assert all(f"worker {worker} is barred" in symptoms for worker in barred)
    audit = run.account.fsck()
    assert audit.clean, (audit.faults, audit.lost, audit.doubled)
