from __future__ import annotations

import threading
from collections.abc import Callable

from buffer.run.run import Run
from consumer.handle.rollout_consumer import RolloutConsumer
from rolloutmq import ShadowConsumer
from tests.consumer.handle.crew import at_work

STEPS = 6


def train(run: Run, begun: threading.Event, taken: dict[int, list[str]]) -> None:
    consumer = RolloutConsumer(run)
    consumer.open()
    begun.wait()
    for step in range(1, STEPS + 1):
        batch = consumer.take_batch(step, {"math": 2})
        taken[step] = batch.manifest.gids
        consumer.commit(step, keep=max(0, step - 2))
    consumer.finish()
    consumer.close()


def test_a_shadow_reads_what_the_trainer_got_and_changes_nothing(
    make_run: Callable[..., Run],
) -> None:
    run = make_run(stale_threshold=99)
    taken: dict[int, list[str]] = {}
    begun = threading.Event()
    trainer = threading.Thread(target=train, args=(run, begun, taken))
    with at_work(run, stamp=0, math=2 * STEPS + 4):
        trainer.start()
        shadow = ShadowConsumer(run, first=1)
        begun.set()
        seen = {batch.step: [group.gid for group in batch.groups] for batch in shadow.batches()}
        trainer.join()
    assert {**seen, **dict.fromkeys(shadow.missed)}.keys() == taken.keys()
    assert all(taken[step] == gids for step, gids in seen.items())
    assert not set(seen) & set(shadow.missed)
    assert seen
    assert run.account.fsck().clean


def test_a_shadow_says_what_it_missed(make_run: Callable[..., Run]) -> None:
    run = make_run(stale_threshold=99)
    taken: dict[int, list[str]] = {}
    begun = threading.Event()
    begun.set()
    with at_work(run, stamp=0, math=2 * STEPS + 4):
        train(run, begun, taken)
    run.ledger.archive.forget(everything=True)
    shadow = ShadowConsumer(run, first=1)
    seen = [batch.step for batch in shadow.batches()]
    assert sorted([*seen, *shadow.missed]) == list(range(1, STEPS + 1))
    assert shadow.missed[:3] == [1, 2, 3]
