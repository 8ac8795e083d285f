"""Read a batch on several ranks: each its share of the groups, balanced by tokens.

A group that one rank cannot read is replaced, and the batch shared out again, before any rank
trains.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from buffer.errors import GroupChanged, RolloutMQError, StepFailed
from buffer.model.manifest import Manifest
from buffer.run import Run
from buffer.wire.group import RolloutGroup
from consumer.handle.rank_orders import RankOrders, on_all_ranks
from consumer.handle.ranks import Ranks, balanced_shares
from consumer.handle.reader import NOTHING, BatchReader, Known, Problems


class ShareReader(BatchReader):
    """Reads this rank's share of each batch; on rank 0, the reader of its `RolloutConsumer`."""

    def __init__(self, run: Run, orders: RankOrders) -> None:
        super().__init__(run)
        self.orders = orders
        orders.add(self)
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
        shares = balanced_shares(self._tokens(manifest), ranks.size)
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

    def _tokens(self, manifest: Manifest) -> list[int]:
        """Return the generated tokens of each group by its record, or its bytes if it has none."""
        records = [self._run.keys.group(entry.gid) for entry in manifest.entries]
        found: list[Any] = self._run.store.each(
            "tokens", [("HGET", key, "tokens") for key in records], "control"
        )
        return [
            int(n or entry.payload.size) for n, entry in zip(found, manifest.entries, strict=True)
        ]


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
