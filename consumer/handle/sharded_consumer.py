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

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from buffer.control.task_status import ProduceBatchStatus
from buffer.errors import GroupChanged, RolloutMQError, StepFailed
from buffer.ledger.position import Position
from buffer.manifest import Manifest
from buffer.run.run import Run
from buffer.wire.group import RolloutGroup
from consumer.handle.batch import Batch
from consumer.handle.ranks import RankOrders, Ranks, balanced_shares, on_all_ranks
from consumer.handle.reader import NOTHING, BatchReader, Known, Problems
from consumer.handle.rollout_consumer import RolloutConsumer


class ShareReader(BatchReader):
    """Reads this rank's share of each batch, balanced by tokens.

    On rank 0, it is the reader of the `RolloutConsumer`. A group that one rank cannot read is
    replaced, and the batch shared out again, before any rank trains.
    """

    def __init__(self, run: Run, orders: RankOrders) -> None:
        super().__init__(run)
        self.orders = orders
        orders.add("reader", self)
        self._run = run
        self._step = 0
        self._share: list[RolloutGroup] = []

    def share(self, step: int) -> list[RolloutGroup]:
        """Return this rank's share of the batch that was read last. It must be that of `step`."""
        if step != self._step:
            raise StepFailed(
                f"rank {self.orders.ranks.rank} has groups of step {self._step}, not {step}",
                hint="take the step again; it is unchanged",
            )
        return self._share

    def read(
        self, manifest: Manifest, known: Known = NOTHING
    ) -> tuple[list[RolloutGroup], Problems]:
        """Let all ranks read their shares; return that of rank 0, or what some rank cannot use.

        Raises StepFailed if a rank cannot read for another reason.
        """
        ranks = self.orders.ranks
        if ranks.size == 1:
            self._step = manifest.step
            self._share, problems = super().read(manifest, known)
            return self._share, problems
        reads = [("HGET", self._run.keys.group(gid), "tokens") for gid in manifest.gids]
        tokens: list[Any] = self._run.store.send("tokens", reads)
        # the bytes of a group stand in for the tokens that no record has
        weights = [
            int(n or entry.payload.size) for n, entry in zip(tokens, manifest.entries, strict=True)
        ]
        shares = balanced_shares(weights, ranks.size)
        problems = self.read_share(manifest.step, manifest.lines, shares)
        if "" in problems:
            raise StepFailed(
                f"step {manifest.step}: {problems['']}", hint="take the step again; it is unchanged"
            )
        return self._share, problems

    @on_all_ranks
    def read_share(self, step: int, lines: list[str], shares: list[list[int]]) -> Problems:
        ranks = self.orders.ranks
        whole = Manifest.parse(step, lines)
        entries = tuple(whole.entries[position] for position in shares[ranks.rank])
        try:
            # the header of the whole batch: it defines which tokens are masked
            groups, problems = super().read(Manifest(step, whole.header, entries))
            self._step, self._share = step, groups
        except RolloutMQError as error:
            problems = {"": f"rank {ranks.rank}: {type(error).__name__}: {error}"}
        return {gid: why for part in ranks.gather(problems) for gid, why in part.items()}


def check_unchanged(groups: Sequence[RolloutGroup], ranks: Ranks) -> None:
    """Raise GroupChanged on all ranks if a group of one is not what the server sent."""
    changed = None
    try:
        for group in groups:
            group.check_unchanged()
    except GroupChanged as error:
        changed = (f"rank {ranks.rank}: {error.message}", error.hint)
    for found in ranks.gather(changed):
        if found:
            raise GroupChanged(found[0], hint=found[1])


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
