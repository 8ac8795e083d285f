"""Read a batch on several ranks: each its share of the groups, balanced by tokens.

A batch is whole or it fails: a group that one rank cannot read is quarantined and replaced, and the
batch is shared out again, before any rank may train.
"""

from __future__ import annotations

from typing import Any

from buffer.errors import GroupChanged, RolloutMQError, StepFailed
from buffer.model.manifest import Manifest
from buffer.rollouts.group import RolloutGroup
from buffer.run import Run
from consumer.handle.ranks import Ranks, balanced_shares
from consumer.handle.reader import BatchReader, Problems


class BatchShares:
    """Reads the share of this rank.

    Usage:

        shares = BatchShares(run, ranks)
        plan = shares.plan(manifest)        # on rank 0, which passes it to all ranks
        problems = shares.read(*plan)       # on all ranks
        train(shares.groups)
    """

    def __init__(self, run: Run, ranks: Ranks) -> None:
        self._run = run
        self._ranks = ranks
        self.reader = BatchReader(run)
        self.groups: list[RolloutGroup] = []
        """this rank's share of the newest batch"""

    def plan(self, manifest: Manifest) -> tuple[int, list[str], list[list[int]]]:
        """Return the step, its manifest as text, and the positions of the groups of each rank."""
        shares = balanced_shares(self._tokens(manifest), self._ranks.size)
        return manifest.step, manifest.lines, shares

    def read(self, step: int, lines: list[str], shares: list[list[int]]) -> Problems:
        """Read this rank's share; return why some rank cannot use its groups, by gid.

        Raises StepFailed, on rank 0 alone, if a rank cannot read for another reason.
        """
        whole = Manifest.parse(step, lines)
        entries = tuple(whole.entries[position] for position in shares[self._ranks.rank])
        try:
            # the header of the whole batch: it defines which tokens are masked
            self.groups, problems = self.reader.read(Manifest(step, whole.header, entries))
        except RolloutMQError as error:
            problems = {"": f"rank {self._ranks.rank}: {type(error).__name__}: {error}"}
        found = {
            gid: reason for part in self._ranks.gather(problems) for gid, reason in part.items()
        }
        if "" in found and self._ranks.rank == 0:
            raise StepFailed(
                f"step {step}: {found['']}", hint="take the step again; it is unchanged"
            )
        return found

    def check_unchanged(self) -> None:
        """Compare the shares of all ranks with what the server sent, after their use.

        Raises GroupChanged on all ranks if one of them differs.
        """
        changed = None
        try:
            self.check_own()
        except GroupChanged as error:
            changed = (f"rank {self._ranks.rank}: {error.message}", error.hint)
        for found in self._ranks.gather(changed):
            if found:
                raise GroupChanged(found[0], hint=found[1])

    def check_own(self) -> None:
        """Raise GroupChanged unless this rank's share is what the server sent."""
        for group in self.groups:
            group.check_unchanged()

    def _tokens(self, manifest: Manifest) -> list[int]:
        """Return the generated tokens of each group by its record, or its bytes if it has none."""
        records = [self._run.keys.group(entry.gid) for entry in manifest.entries]
        found: list[Any] = self._run.store.each(
            "tokens", [("HGET", key, "tokens") for key in records], "control"
        )
        return [
            int(n or entry.payload.size) for n, entry in zip(found, manifest.entries, strict=True)
        ]
