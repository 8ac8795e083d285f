"""One evaluation: groups of a held-out task, made by given weights or newer ones.

    ask ──▶ eval lane, before all training work ──▶ pool ──▶ take of the eval ledger ──▶ commit ──▶ groups
                                                              └── of other weights, or left by another trainer: put away

Evaluations have a ledger, manifests and tasks of their own: no training pool ever holds such a
group, and no training counter moves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from buffer.model.group import RolloutGroup
from buffer.model.ids import split_group_id
from buffer.model.manifest import Manifest, NotReady
from buffer.run import Run
from consumer.batches.reader import BatchReader
from consumer.batches.wait import BatchWait

Take = Callable[[Mapping[str, int]], Manifest | NotReady]


class EvaluationRound:
    """`count` groups of `task`, begun when `version` was the newest policy version. For the trainer
    `nonce`.
    """

    def __init__(self, run: Run, nonce: str, reader: BatchReader, task: str, count: int) -> None:
        self._run = run
        self._nonce = nonce
        self._reader = reader
        self.task = task
        self._count = count
        self.version = run.control.state().weights.version
        self._step = 0
        self._ask()

    def _ask(self) -> None:
        """Absolute, from what was used so far: asking again asks for no more."""
        taken, committed, _ = self._run.evaluations.steps()
        self._step = committed + 1
        if taken < self._step:
            used = int(self._run.progress(self.task).get("consumed", 0))
            self._run.evaluations.set_target(self._nonce, self.task, used + self._count)

    def wait(self, wait: BatchWait) -> list[RolloutGroup]:
        """All groups, made by the weights `version` and by no others."""
        while True:
            manifest = wait.until_taken(self._step, {self.task: self._count}, self._take)
            groups = self._read(manifest)
            if self._is_ours(manifest) and all(
                entry.version in (self.version, None) for entry in manifest.entries
            ):
                return groups
            self._ask()

    def join(self, wait: BatchWait) -> list[RolloutGroup]:
        """`poll`, until it is ready."""
        while True:
            self._ask()
            manifest = wait.until_taken(self._step, {self.task: self._count}, self._take)
            if (groups := self._accept(manifest)) is not None:
                return groups

    def poll(self) -> list[RolloutGroup] | None:
        """All groups once they are ready, without waiting. Those that were begun late may be of
        newer weights.
        """
        self._ask()
        manifest = self._take({self.task: self._count})
        if isinstance(manifest, NotReady):
            return None
        return self._accept(manifest)

    def _accept(self, manifest: Manifest) -> list[RolloutGroup] | None:
        groups = self._read(manifest)
        versions = [entry.version for entry in manifest.entries if entry.version is not None]
        return (
            groups
            if self._is_ours(manifest) and all(found >= self.version for found in versions)
            else None
        )

    def _take(self, counts: Mapping[str, int]) -> Manifest | NotReady:
        return self._run.evaluations.take(self._nonce, self._step, counts)

    def _read(self, manifest: Manifest) -> list[RolloutGroup]:
        _, groups = self._reader.read(self._run.evaluations, manifest)
        self._run.evaluations.commit(self._nonce, self._step, self._step)
        return groups

    def _is_ours(self, manifest: Manifest) -> bool:
        tasks = {split_group_id(entry.gid)[0] for entry in manifest.entries}
        return tasks == {self.task} and len(manifest.entries) == self._count
