"""`RolloutConsumer` for a data-parallel trainer: every rank reads its share of one batch.

Rank 0 is the trainer of the run: it alone takes, commits, pauses. A step is whole or it fails: a
rank that cannot read its share, or dies, fails the step on all ranks; nothing is committed, and the
same step is delivered again, byte for byte (I5).

    ranks = consumer.handle.ranks.join()                    # the process group, restarts included
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
from typing import Any

from buffer.control.task_status import ProduceBatchStatus
from buffer.errors import CheckpointNow, Fenced, GroupChanged, StepFailed
from buffer.ledger.position import Position
from buffer.model.manifest import Manifest
from buffer.rollouts.group import RolloutGroup
from buffer.run import Run
from consumer.handle.batch import Batch, Stopped
from consumer.handle.ranks import Ranks
from consumer.handle.reader import NOTHING, Known, Problems
from consumer.handle.rollout_consumer import RolloutConsumer
from consumer.handle.shares import BatchShares

SHARED_ERRORS: Mapping[str, type[Exception]] = {
    kind.__name__: kind for kind in (CheckpointNow, Fenced, GroupChanged, Stopped, TimeoutError)
}
"""Errors of rank 0 that every rank raises as they are, since the caller can act on them."""


class ShardedConsumer:
    """Represents one rank of a data-parallel trainer.

    All ranks call the same methods in the same order.
    """

    def __init__(self, run: Run, ranks: Ranks) -> None:
        self.ranks = ranks
        self._shares = BatchShares(run, ranks)
        self.leader = (
            RolloutConsumer(run, prefetch_bytes=0, reader=self) if ranks.rank == 0 else None
        )
        """on rank 0 only, the trainer of the run: to pause, publish_weights, evaluate"""

    @property
    def vocabulary(self) -> int | None:
        """The number of the model's token ids: set it on every rank."""
        return self._shares.reader.vocabulary

    @vocabulary.setter
    def vocabulary(self, size: int | None) -> None:
        self._shares.reader.vocabulary = size

    def open(
        self, *, position: Position | None = None, take_over: bool = False, regenerate: bool = False
    ) -> None:
        """Make rank 0 the trainer of the run; see `RolloutConsumer.open`."""

        def open_it(leader: RolloutConsumer) -> None:
            leader.open(position=position or Position(), take_over=take_over, regenerate=regenerate)

        self._on_leader(open_it)

    def close(self) -> None:
        """Give up the role."""
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

        A group that some rank cannot read or train is quarantined, another one awaited, and the
        batch shared out again. Raises StepFailed on all ranks if one of them fails otherwise.

        `take_batch`, `confirm` and `commit` raise GroupChanged on all ranks if a group of one is
        not what the server sent any more.
        """
        self._shares.check_unchanged()

        def take(leader: RolloutConsumer) -> tuple[list[str], float, str]:
            batch = leader.take_batch(step, counts, strict=strict, deadline_s=deadline_s)
            return batch.manifest.lines, batch.waited_s, batch.status.value

        lines, waited_s, status = self._on_leader(take)
        manifest = Manifest.parse(step, lines)
        return Batch(step, self._shares.groups, manifest, waited_s, ProduceBatchStatus(status))

    def read(
        self, manifest: Manifest, known: Known = NOTHING
    ) -> tuple[list[RolloutGroup], Problems]:
        """Read the shares of all ranks; called on rank 0 by its `RolloutConsumer`."""
        plan = self._shares.plan(manifest)
        self.ranks.share({"read": plan})
        problems = self._shares.read(*plan)
        return self._shares.groups, problems

    def confirm(self, step: int) -> None:
        """Wait until all ranks have written their parts of the checkpoint of `step`.

        Then rank 0 may make it visible and commit. If a rank failed or died, all ranks raise
        StepFailed or RankLost.
        """
        self._shares.check_unchanged()
        steps = self.ranks.gather(step)
        if any(found != step for found in steps):
            raise StepFailed(
                f"the ranks are at different steps: {steps}",
                hint="restart from the last checkpoint",
            )

    def commit(self, step: int, *, keep: int) -> None:
        """Commit `step`, whose checkpoint is complete and visible; see `RolloutConsumer.commit`."""
        self._shares.check_unchanged()
        self._on_leader(lambda leader: leader.commit(step, keep=keep))

    def _on_leader(self, act: Callable[[RolloutConsumer], Any]) -> Any:
        """Call `act` on rank 0; return its result, or raise its error, on all ranks.

        Meanwhile the other ranks read the shares that rank 0 gives them.
        """
        if self.leader is None:
            return self._follow()
        try:
            value = act(self.leader)
        except Exception as error:  # the other ranks wait for it, and raise it as well
            self.ranks.share({"error": type(error).__name__, "reason": str(error)})
            raise
        self.ranks.share({"value": value})
        return value

    def _follow(self) -> Any:
        while True:
            answer = self.ranks.share()
            if "value" in answer:
                return answer["value"]
            if "error" in answer:
                kind = SHARED_ERRORS.get(answer["error"], StepFailed)
                raise kind(f"rank 0: {answer['error']}: {answer['reason']}")
            self._shares.read(*answer["read"])
