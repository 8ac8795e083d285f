"""The disaggregated state machine: what a waiting trainer is told, and what then helps (I7, I8)."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import pytest

from buffer.control.control import Mode
from buffer.control.task_status import ProduceBatchStatus
from buffer.errors import ExpiredBatch, Fenced, NoBatch, ProducerGone
from buffer.ids import group_id, new_nonce
from buffer.ledger.account import FsckReport
from buffer.limits import TaskLimits
from consumer.handle.batch import Batch
from consumer.handle.rollout_consumer import RolloutConsumer
from producer_workers.producer.producer import Producer
from tests.pipeline import produce
from tests.pipeline.produce import make_producer
from tests.pipeline.yard import LINEAGE, TASK, Yard
from tests.servers import Server
from tests.warm_process import start_program

SHARE = 4
"""Groups of one step."""


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    path = tmp_path / "problems.jsonl"
    path.write_bytes(
        b"\n".join(orjson.dumps({"question": f"{n:04d}", "answer": n}) for n in range(50))
    )
    return path


def consumer_of(yard: Yard) -> RolloutConsumer:
    consumer = RolloutConsumer(yard.run, prefetch_bytes=0, nonce=yard.trainer)  # is never closed
    consumer.lineage = LINEAGE
    return consumer


@contextmanager
def producing(producer: Producer) -> Iterator[None]:
    stop = threading.Event()
    thread = threading.Thread(
        target=producer.produce_loop, args=(stop,), kwargs={"take_over": True}
    )
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def play(yard: Yard, trainer: Callable[[], None]) -> None:
    async def scenario() -> None:
        async with yard.working(yard.worker()):
            await asyncio.to_thread(trainer)

    asyncio.run(scenario())
    yard.check()


def take(consumer: RolloutConsumer, step: int, count: int = SHARE) -> Batch:
    return consumer.take_batch(step, {TASK: count}, deadline_s=400.0)


@pytest.mark.parametrize(
    ("setting", "changes"),
    [
        ("max_staleness", {}),
        ("max_ahead", {"stale_threshold": 2, "ahead_threshold": 1}),
        ("max_token_staleness", {"stale_threshold": 2, "token_threshold": 1}),
    ],
)
def test_weights_that_are_too_old_are_reported_and_newer_ones_serve_the_same_step(
    make_yard: Callable[..., Yard], dataset: Path, setting: str, changes: dict[str, int]
) -> None:
    yard = make_yard(**changes)
    consumer = consumer_of(yard)

    def trainer() -> None:
        for step in (1, 2, 3):
            if step > 1:
                with pytest.raises(
                    ExpiredBatch, match=f"publish the weights of step {step - 1}"
                ) as caught:
                    take(consumer, step)
                assert f"{setting} lets one version" in caught.value.message
                yard.publish(step - 1)
            batch = take(consumer, step)
            assert (
                batch.status is ProduceBatchStatus.EXPIRED_BATCH
            )  # these weights serve one step each
            assert [entry.version for entry in batch.manifest.entries] == [step - 1] * SHARE

    with producing(make_producer(yard.run, dataset, SHARE)):
        play(yard, trainer)


def test_a_batch_that_will_never_be_made_is_an_error_with_all_counters(
    make_yard: Callable[..., Yard], dataset: Path
) -> None:
    """It asks for more than the plan, so that it is neither too old nor worked on."""
    yard = make_yard(stale_threshold=3)
    consumer = consumer_of(yard)

    def trainer() -> None:
        with pytest.raises(
            NoBatch, match=rf"target \d+, cursor {3 * SHARE}, completed {3 * SHARE}"
        ) as caught:
            take(consumer, 1, 4 * SHARE)
        assert "batch_size" in caught.value.hint
        assert len(take(consumer, 1).groups) == SHARE
        # so would this, were there not weights that are newer: they serve one step more
        with pytest.raises(ExpiredBatch, match="publish the weights of step 1"):
            take(consumer, 2, 3 * SHARE)
        yard.publish(1)
        assert len(take(consumer, 2, 3 * SHARE).groups) == 3 * SHARE

    with producing(make_producer(yard.run, dataset, SHARE, threshold=3)):
        play(yard, trainer)


@pytest.mark.parametrize("strategy", ["async", "sync"])
def test_a_last_batch_without_a_usable_group_is_made_again(
    make_yard: Callable[..., Yard], dataset: Path, strategy: str
) -> None:
    """The trainer is replaced while it waits; its successor completes the same batch."""
    yard = make_yard(tasks={TASK: TaskLimits(strategy=strategy)})
    first = consumer_of(yard)

    def replace(_: Any) -> None:
        yard.trainer = new_nonce()
        yard.run.trainers.open(yard.trainer, step=1, lineage=LINEAGE, take_over=True)

    def let_run(_: Any) -> None:
        yard.control(Mode.RUN)

    def trainer() -> None:
        take(first, 1)
        first.commit(1, keep=1)
        yard.publish(1)
        asyncio.run(yard.until_stages(archived=SHARE, completed=SHARE))
        # the producer is to make others only while the successor waits
        yard.control(Mode.ABORT)
        bad = {group_id(TASK, draw) for draw in range(SHARE, 2 * SHARE)}
        for gid in bad:
            key = yard.run.keys.payload(gid, yard.run.record(gid)["payload"])
            yard.store.client.set(key, bytes(reversed(yard.store.client.get(key))))
        with pytest.raises(Fenced):
            first.take_batch(2, {TASK: SHARE}, waiting=replace)
        second = consumer_of(yard)
        batch = second.take_batch(2, {TASK: SHARE}, deadline_s=400.0, waiting=let_run)
        assert {letter.gid for letter in yard.run.dead_letters.newest()} == bad
        assert len(batch.groups) == SHARE
        assert not bad & set(batch.manifest.gids)

    with producing(make_producer(yard.run, dataset, SHARE, steps=2)):
        play(yard, trainer)


def test_another_producer_continues_for_a_killed_one_and_without_one_the_trainer_fails(
    make_yard: Callable[..., Yard],
    server_of: Callable[[str], Any],
    dataset: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    yard = make_yard(stale_threshold=1, role_timeout_ms=500)
    consumer = consumer_of(yard)
    words = (server_of("valkey").url, yard.run.name, str(dataset), str(SHARE))
    start = partial(start_program, produce.main, *words)

    def trainer() -> None:
        processes = [start()]
        try:
            take(consumer, 1)
            first = yard.run.control.holder("producer")
            processes[0].kill()
            processes.append(start())
            yard.publish(1)
            take(consumer, 2)
            second = yard.run.control.holder("producer")
            assert second.nonce not in ("", first.nonce)
            processes[1].kill()
            processes[1].join()
            yard.publish(2)
            consumer.producer_timeout_s = 1.0
            with pytest.raises(ProducerGone, match=f"the producer {second.nonce[:8]}… ") as gone:
                take(consumer, 3)
            assert (
                f"(process {processes[1].pid} on {socket.gethostname()}) sent its last heartbeat"
                in str(gone.value)
            )
            assert "rolloutmq producer" in gone.value.hint
        finally:
            for process in processes:
                process.kill()
                process.join()

    play(yard, trainer)


# -- on a cluster ------------------------------


STEPS = 5


@pytest.mark.parametrize("make_yard", ["cluster"], indirect=True)
def test_a_cluster_serves_a_whole_run(
    make_yard: Callable[..., Yard], server_of: Callable[[str], Server], tmp_path: Path
) -> None:
    dataset = tmp_path / "problems.jsonl"
    server = server_of("cluster")
    dataset.write_bytes(
        b"\n".join(orjson.dumps({"question": f"{n:04d}", "answer": n}) for n in range(50))
    )
    yard = make_yard(stale_threshold=2)
    consumer = consumer_of(yard)
    trained = list[str]()
    nodes_with_bytes = set[str]()

    def trainer() -> None:
        for step in range(1, STEPS + 1):
            batch = take(consumer, step)
            assert [len(group.states) for group in batch.groups] == [2] * SHARE
            trained.extend(batch.manifest.gids)
            nodes_with_bytes.update(nodes_of(yard, batch.manifest.gids))
            consumer.commit(step, keep=step)
            yard.publish(step)

    words = (server.url, yard.run.name, str(dataset), str(SHARE))
    producer = start_program(produce.main, *words)
    try:
        play(yard, trainer)
    finally:
        consumer.close()
        producer.kill()
        producer.join()
    assert len(set(trained)) == len(trained) == STEPS * SHARE
    assert len(nodes_with_bytes) == 1
    audit = account(yard)
    assert (audit.tasks[0].archived, yard.run.ledger.steps()) == (
        STEPS * SHARE,
        (STEPS, STEPS, STEPS),
    )
    while yard.run.payloads.collect():
        pass
    assert not [gid for gid in trained if yard.run.record(gid)]
    assert nodes_of(yard, trained) == set()


def account(yard: Yard) -> FsckReport:
    audit = yard.run.account.fsck()
    assert audit.clean, (audit.faults, audit.lost, audit.doubled)
    assert audit.tasks[0].task == TASK
    return audit


def nodes_of(yard: Yard, gids: list[str]) -> set[str]:
    found = set()
    for url, client in yard.store.servers.masters():
        keys = [
            key.decode() for key in client.scan_iter(f"{yard.run.keys.prefix}payload:*", count=1000)
        ]
        if [key for key in keys if any(f":{gid}:" in key for gid in gids)]:
            found.add(url)
    return found
