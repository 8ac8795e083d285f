from __future__ import annotations

import threading

import pytest

from buffer.ids import group_id
from buffer.run.run import Run
from buffer.wire import group_bytes
from consumer.handle.reader import Prefetcher
from tests.consumer.conftest import Trainers
from tests.consumer.handle.crew import at_work
from tests.waits import until


def test_the_next_batch_is_read_while_the_present_one_trains_and_nothing_is_taken(
    run: Run, trainer: Trainers
) -> None:
    consumer = trainer(run)
    with at_work(run, math=6):
        first = consumer.take_batch(1, {"math": 3})
        until(
            lambda: consumer.metrics()["prefetch/read_groups"] >= 3, "three groups to be read ahead"
        )
    before = (run.ledger.steps(), run.buffer.count("math"), run.account.totals())
    assert before[:2] == ((1, 0, 0), 3)
    second = consumer.take_batch(2, {"math": 3})
    metrics = consumer.metrics()
    assert metrics["prefetch/used_groups"] == 3
    assert metrics["take/groups"] == 6
    assert not set(first.manifest.gids) & set(second.manifest.gids)
    assert [group_bytes.encode(g) for g in second.groups] == [
        group_bytes.encode(g) for g in run.buffer.load(second.manifest)
    ]  # as read now, without it


def test_what_is_read_ahead_stays_within_its_bytes_and_follows_what_is_next(
    run: Run, trainer: Trainers
) -> None:
    consumer = trainer(run)
    with at_work(run, math=6):
        until(lambda: run.buffer.count("math") == 6, "six groups")
    sizes = [entry.payload.size for entry in run.buffer.peek(6, "math")]
    ahead = Prefetcher(run, sum(sizes[:2]), threading.Event())
    try:
        ahead.begin({"math": 6, "quiz": 0})
        until(lambda: ahead.read == 2, "two groups")
        assert ahead.held_bytes == sum(sizes[:2])
        run.jobs.drop(
            group_id("math", 0)
        )  # the first one leaves: the third takes its slot, if it fits
        until(lambda: ahead.held_bytes != sum(sizes[:2]) or ahead.read == 3, "another peek")
        ahead.end()
        manifest = consumer.take_batch(1, {"math": 5}).manifest
        refs = [entry.payload for entry in manifest.entries]
        found = ahead.pop(refs)
        assert found
        assert set(found) <= set(refs)
        assert group_id("math", 0) not in {ref.gid for ref in found}
        assert ahead.held_bytes == 0
    finally:
        ahead.close()


def test_a_group_that_was_replaced_after_it_was_read_is_read_again(
    run: Run, trainer: Trainers
) -> None:
    consumer = trainer(run)
    with at_work(run, math=4):
        consumer.take_batch(1, {"math": 1})
        until(lambda: consumer.metrics()["prefetch/held_bytes"] > 0, "a group to be read ahead")
        until(lambda: run.buffer.count("math") == 3, "the others")
    (entry,) = run.buffer.peek(1, "math")
    states = run.buffer.read(entry.payload).states
    for state in states:
        state.reward = {"score": 0.125}
    run.buffer.update(entry.gid, states, replaces=entry.payload.token)
    batch = consumer.take_batch(2, {"math": 1})
    assert batch.groups[0].scores.tolist() == [0.125] * 4
    assert batch.groups[0].gid == entry.gid


def test_a_close_waits_for_a_thread_that_another_thread_is_starting(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cancelled take of the asyncio consumer goes on beside its `close`."""
    prefetcher = Prefetcher(run, 1 << 20, threading.Event())
    is_starting = threading.Event()
    started = list[threading.Thread]()
    alive_at_close = list[bool]()
    start = threading.Thread.start

    def start_beside_close(thread: threading.Thread) -> None:
        if thread.name == "trainer-prefetch":
            started.append(thread)
            is_starting.set()
            closing.join(0.2)  # long enough for a `close` that does not wait
        start(thread)

    def close() -> None:
        is_starting.wait(400)
        prefetcher.close()
        alive_at_close.append(started[0].is_alive())

    closing = threading.Thread(target=close)
    closing.start()
    monkeypatch.setattr(threading.Thread, "start", start_beside_close)
    prefetcher.begin({"math": 1})
    closing.join()
    started[0].join()
    assert alive_at_close == [False]
