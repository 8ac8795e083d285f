"""Publishing weights: written or sent, announced, published in a pause, and pruned.

thread        owns                                     until
trainer's     the weights                              a snapshot of them is taken
publication   the snapshot, the sender, the            the workers continue; then the trainer
              unfinished folder, the pause             may take the next snapshot

Workers fetch an announced version while they sample with the one before. The pause begins when all
have it, or as soon as the trainer waits. A step that ends before the last version is published
waits for it: staleness counts published versions, so none is skipped.

the trainer dies                       what stays, until the next trainer publishes
  before the announcement              unfinished files, deleted at the next start
  before the publication               workers sample on; the announcement, deleted then
  after it, in the pause               the version is published, the run paused
a rank dies                            as the trainer: all ranks end
a worker dies                          nothing: it is not waited for (receipts.py)
a worker cannot fetch the version      nothing: it is not waited for, and says so (wait_rules.py)
the server is away                     the publication waits for it, training does not
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

from buffer.errors import PublicationFailed, RolloutMQError
from buffer.run.run import Run
from buffer.weights import transports
from buffer.weights.transport import Save, WeightsSender
from buffer.wire.rollout import PolicyVersion
from consumer.config.trainer import TrainingConfig
from consumer.handle.rollout_consumer import PauseMode, RolloutConsumer, Stopped

log = logging.getLogger("rolloutmq.trainer")


class PublicationTimes(NamedTuple):
    """Seconds to write the weights, while workers continue, and until all workers were paused."""

    write_s: float
    pause_s: float


def open_sender(config: TrainingConfig, run: Run) -> WeightsSender:
    policy = config.policy
    return transports.open_sender(
        policy.weights_transport,
        run.store,
        run.keys,
        policy.weights_folder(config.run),
        keep=config.trainer.keep_weights,
        delta_base_every=policy.delta_base_every,
        url=config.weights.url_of(config.run),
    )


def publish(
    consumer: RolloutConsumer, sender: WeightsSender, step: int, save: Save, *, pause: PauseMode
) -> PublicationTimes:
    """Publish the weights after train step `step`, whose files `save` writes into a folder.

    Pauses the workers while they switch, and deletes old versions. Raises Stopped, and publishes
    nothing, after `consumer.stop`.
    """
    with published(consumer, sender, step, save, pause=pause) as times:
        return times


class Publisher:
    def __init__(self, consumer: RolloutConsumer, sender: WeightsSender, pause: PauseMode) -> None:
        self._consumer = consumer
        self._sender = sender
        self._pause: PauseMode = pause
        self.published = 0  # step of the newest weights that workers may know
        self._thread = ThreadPoolExecutor(1, "publication")
        self._is_urgent = threading.Event()
        self._pending: Future[None] | None = None

    @property
    def is_pending(self) -> bool:
        return self._pending is not None

    def begin(self, step: int, save: Save) -> None:
        """Publish the weights after step `step`, once the version before is published."""
        self.finish()
        self._is_urgent.clear()
        self._pending = self._thread.submit(self._publish, step, save)

    def _publish(self, step: int, save: Save) -> None:
        consumer, sender, pause = self._consumer, self._sender, self._pause
        with published(consumer, sender, step, save, pause=pause, unless=self._is_urgent):
            pass
        self.published = step

    def is_done(self, wait_s: float) -> bool:
        """Wait up to `wait_s` seconds; return whether nothing is in progress.

        From now on, the publication does not wait for workers to fetch the version.
        """
        self._is_urgent.set()
        return self._pending is None or bool(wait([self._pending], wait_s).done)

    def check(self) -> None:
        if self._pending and self._pending.done():
            self.finish()

    def finish(self) -> None:
        """Wait for the version in progress. Raises PublicationFailed, Fenced, Stopped."""
        pending = self._pending
        self._pending = None
        if pending is None:
            return
        self._is_urgent.set()
        try:
            pending.result()
        except (RolloutMQError, Stopped):
            raise
        except Exception as error:  # of the disk, of torch: the trainer ends with a reason
            raise PublicationFailed(
                f"weights could not be published: {error!r}",
                hint="the trainer continues from the newest checkpoint when it is started again",
            ) from error

    def close(self) -> None:
        """End. A trainer that fails does not wait for the workers of a version in progress."""
        if self._pending and not self._pending.done():
            self._consumer.stop()
        self._thread.shutdown()
        if self._pending and (error := self._pending.exception()):
            log.warning("the weights in progress were not published: %r", error)


@contextmanager
def published(
    consumer: RolloutConsumer,
    sender: WeightsSender,
    step: int,
    save: Save,
    *,
    pause: PauseMode | None,
    unless: threading.Event | None = None,
) -> Iterator[PublicationTimes]:
    """Publish, paused until the end of the block; `pause` None: the caller has paused.

    With `unless`, the pause begins when every worker has fetched the version, or once that is set.
    """
    started = time.monotonic()
    weights = sender.write(PolicyVersion(consumer.lineage, step), save)  # before the pause
    write_s = time.monotonic() - started
    if pause:
        announced = consumer.announce_weights(step, *weights)
        if unless:  # else they are fetched while the pause waits for groups
            consumer.wait_until_fetched(announced, unless)
    with consumer.paused(pause) if pause else nullcontext(0.0) as pause_s:
        consumer.publish_weights(step, *weights)
        sender.prune()
        yield PublicationTimes(write_s, pause_s)
