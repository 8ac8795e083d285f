from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from buffer.errors import GroupChanged
from buffer.run.run import Run
from buffer.wire.rollout import FIRST_WEIGHTS
from consumer.handle.batch import Batch
from consumer.handle.rollout_consumer import RolloutConsumer
from tests.consumer.conftest import Trainers
from tests.consumer.handle.crew import at_work
from tests.consumer.handle.test_rollout_consumer import write_weights
from tests.memory_fault import overwrite

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
