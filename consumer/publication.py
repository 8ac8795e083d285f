"""Publishing weights: written or sent, announced to the workers in a pause, and pruned."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

from buffer.config.config import TrainingConfig
from buffer.rollouts.rollout import PolicyVersion
from buffer.run import Run
from buffer.weights import registry
from buffer.weights.transport import Save, WeightsSender
from consumer.rollout_consumer import PauseMode, RolloutConsumer


class PublicationTimes(NamedTuple):
    """Seconds to write the weights, while workers continue, and until all workers were paused."""

    write_s: float
    pause_s: float


def open_sender(config: TrainingConfig, run: Run) -> WeightsSender:
    """Open the transport of [policy] weights_transport."""
    policy = config.policy
    return registry.open_sender(
        policy.weights_transport,
        run.store,
        run.keys,
        policy.weights_folder(config.run),
        keep=config.trainer.keep_weights,
        host=policy.weights_host,
    )


def publish(
    consumer: RolloutConsumer, sender: WeightsSender, step: int, save: Save, *, pause: PauseMode
) -> PublicationTimes:
    """Publish the weights after train step `step`, whose files `save` writes into a folder.

    Workers are paused while they switch; old versions are deleted. Raises Stopped after
    `consumer.stop`: then nothing is published, and the next trainer publishes its own.
    """
    with published(consumer, sender, step, save, pause=pause) as times:
        return times


@contextmanager
def published(
    consumer: RolloutConsumer,
    sender: WeightsSender,
    step: int,
    save: Save,
    *,
    pause: PauseMode | None,
) -> Iterator[PublicationTimes]:
    """Publish as `publish` does; the pause lasts until the end of the block.

    `pause` is None if the caller has paused the run already.
    """
    started = time.monotonic()
    weights = sender.write(PolicyVersion(consumer.lineage, step), save)  # before the pause
    write_s = time.monotonic() - started
    with consumer.paused(pause) if pause else nullcontext(0.0) as pause_s:
        consumer.publish_weights(step, *weights)
        sender.prune()
        yield PublicationTimes(write_s, pause_s)
