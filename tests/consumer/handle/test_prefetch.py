from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from buffer.errors import GroupChanged
from buffer.ids import group_id
from buffer.run.run import Run
from buffer.wire import group_bytes
from buffer.wire.rollout import FIRST_WEIGHTS
from consumer.handle.batch import Batch
from consumer.handle.reader import Prefetcher
from consumer.handle.rollout_consumer import RolloutConsumer
from tests.consumer.conftest import Trainers
from tests.consumer.handle.crew import at_work
from tests.consumer.handle.test_rollout_consumer import write_weights
from tests.memory_fault import overwrite
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


Act = Callable[[RolloutConsumer, Path], object]

ACTS: dict[str, Act] = {
    "take": lambda consumer, _: consumer.take_batch(2, {"math": 2}),
    "take again": lambda consumer, _: consumer.take_batch(1, {"math": 2}),
    "commit": lambda consumer, _: consumer.commit(1, keep=1),
    "announce": lambda consumer, folder: consumer.announce_weights(
        1, *write_weights(folder, consumer, 1)
    ),
    "publish": lambda consumer, folder: consumer.publish_weights(
        1, *write_weights(folder, consumer, 1)
    ),
}


def take(run: Run, consumer: RolloutConsumer) -> Batch:
    with at_work(run, math=5):
        return consumer.take_batch(1, {"math": 2})


@pytest.mark.parametrize("act", ACTS.values(), ids=ACTS)
@pytest.mark.parametrize("column", ["prompt_ids", "response_ids", "logprobs", "rewards"])
def test_nothing_follows_from_a_group_that_changed(
    run: Run, trainer: Trainers, tmp_path: Path, act: Act, column: str
) -> None:
    consumer = trainer(run)
    batch = take(run, consumer)
    overwrite(batch.groups[1].columns[column])
    with pytest.raises(GroupChanged, match=batch.groups[1].gid) as error:
        act(consumer, tmp_path)
    assert error.value.hint
    assert run.ledger.steps()[:2] == (1, 0)
    state = run.control.state()
    assert state.weights == FIRST_WEIGHTS
    assert state.announced is None


def test_groups_of_older_batches_that_are_held_are_compared_too(
    run: Run, trainer: Trainers
) -> None:
    consumer = trainer(run)
    held = take(run, consumer)
    consumer.take_batch(2, {"math": 1})
    overwrite(held.groups[0].logprobs)
    with pytest.raises(GroupChanged):
        consumer.commit(1, keep=1)


def test_a_group_that_was_dropped_is_done_with(run: Run, trainer: Trainers) -> None:
    consumer = trainer(run)
    batch = take(run, consumer)
    ids = batch.groups[0].response_ids
    del batch
    overwrite(ids)
    consumer.commit(1, keep=1)
    assert run.ledger.steps()[1] == 1


def test_groups_of_an_evaluation_are_compared_too(run: Run, trainer: Trainers) -> None:
    consumer = trainer(run)
    with at_work(run, math=1):
        consumer.take_batch(1, {"math": 1})
        groups = consumer.evaluate("quiz", 2)
    overwrite(groups[1].columns["rewards"])
    with pytest.raises(GroupChanged, match="quiz"):
        consumer.commit(1, keep=1)
