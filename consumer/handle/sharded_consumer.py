"""`RolloutConsumer` for a data-parallel trainer: every rank reads its share of one batch.

Rank 0 alone takes, commits, pauses. A rank that dies or cannot read fails the step on all ranks:
nothing is committed, and the step is delivered again, byte for byte (I5).

    ranks = join()                                   # the process group, restarts included
    consumer = ShardedConsumer(run, ranks)
    consumer.open(position=position)
    batch = consumer.take_batch(step, {"math": 16})  # this rank's groups, the manifest of all
    train(batch)                                     # gradients over all ranks
    write_my_part(step)
    consumer.confirm(step)                           # waits until every rank has written its part
    consumer.commit(step, keep=step)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from buffer.control.task_status import ProduceBatchStatus
from buffer.errors import StepFailed
from buffer.ledger.position import Position
from buffer.model.manifest import Manifest
from buffer.run import Run
from buffer.wire.group import RolloutGroup
from consumer.handle.batch import Batch
from consumer.handle.rank_orders import RankOrders
from consumer.handle.ranks import Ranks
from consumer.handle.rollout_consumer import RolloutConsumer
from consumer.handle.shares import ShareReader, check_unchanged


class ShardedConsumer:
    """One rank of a data-parallel trainer; all ranks call the same methods in the same order."""

    def __init__(self, run: Run, ranks: Ranks) -> None:
        self.ranks = ranks
        self._orders = RankOrders(ranks)
        self._reader = ShareReader(run, self._orders)
        self._held: list[RolloutGroup] = []
        self.leader = (
            RolloutConsumer(run, prefetch_bytes=0, reader=self._reader) if ranks.rank == 0 else None
        )  # rank 0 only: to pause, publish_weights, evaluate

    @property
    def vocabulary(self) -> int | None:
        return self._reader.vocabulary

    @vocabulary.setter
    def vocabulary(self, size: int | None) -> None:
        self._reader.vocabulary = size

    def open(
        self, *, position: Position | None = None, take_over: bool = False, regenerate: bool = False
    ) -> None:
        """Make rank 0 the trainer of the run; see `RolloutConsumer.open`."""

        def open_it(leader: RolloutConsumer) -> None:
            leader.open(position=position or Position(), take_over=take_over, regenerate=regenerate)

        self._on_leader(open_it)

    def close(self) -> None:
        if self.leader:
            self.leader.close()

    def take_batch(
        self,
        step: int,
        counts: Mapping[str, int],
        *,
        deadline_s: float | None = None,
        strict: bool = True,
    ) -> Batch:
        """Return this rank's part of step `step`, with the manifest of the whole batch.

        A group that some rank cannot use is replaced, and the batch shared out again. Raises on all
        ranks: StepFailed if one fails otherwise; GroupChanged (as `confirm` and `commit` do) if a
        group is not what the server sent.
        """
        check_unchanged(self._held, self.ranks)

        def take(leader: RolloutConsumer) -> tuple[list[str], float, str]:
            batch = leader.take_batch(step, counts, strict=strict, deadline_s=deadline_s)
            return batch.manifest.lines, batch.waited_s, batch.status.value

        lines, waited_s, status = self._on_leader(take)
        manifest = Manifest.parse(step, lines)
        self._held = self._reader.share(step) if manifest.entries else []
        return Batch(step, self._held, manifest, waited_s, ProduceBatchStatus(status))

    def confirm(self, step: int) -> None:
        """Wait until all ranks have written their parts of the checkpoint of `step`.

        Then rank 0 may make it visible and commit. Raises StepFailed or RankLost on all ranks.
        """
        check_unchanged(self._held, self.ranks)
        steps = self.ranks.gather(step)
        if any(found != step for found in steps):
            raise StepFailed(
                f"the ranks are at different steps: {steps}",
                hint="restart from the last checkpoint",
            )

    def commit(self, step: int, *, keep: int) -> None:
        check_unchanged(self._held, self.ranks)
        self._on_leader(lambda leader: leader.commit(step, keep=keep))

    def _on_leader(self, act: Callable[[RolloutConsumer], Any]) -> Any:
        """Return the result of `act` on rank 0, or raise its error, on all ranks."""
        if self.leader is None:
            return self._orders.follow()
        return self._orders.lead(partial(act, self.leader))
