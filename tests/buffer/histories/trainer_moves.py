"""What a trainer does that dies and comes back, and what its zombies try (I4 to I8)."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest

from buffer.control.control import Mode
from buffer.errors import Fenced, LedgerError
from buffer.manifest import Manifest, NotReady
from buffer.wire.rollout import PolicyVersion
from buffer.wire.staleness import staleness
from tests.buffer.histories.model import WORKERS
from tests.buffer.histories.world import World


class TrainerMoves(World):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.thresholds: dict[int, int] = {}
        self.masks: dict[int, list[list[int]]] = {}
        self.old_trainers: list[str] = []
        self.lineages = count(1)
        self.reopen(0)

    def take(self, math: int, code: int, strict: bool) -> None:
        counts = {task: number for task, number in (("math", math), ("code", code)) if number}
        chosen = {task: self.fresh(task)[:number] for task, number in counts.items()}
        groups = [group for part in chosen.values() for group in part]
        short = any(len(chosen[task]) < number for task, number in counts.items())
        step = self.taken + 1
        answer = self.scene.run.ledger.take(self.scene.trainer, step, counts, strict=strict)
        self.awaits = 0
        if not groups or (strict and short):
            runs = any(self.at("running", task) for task in counts)
            is_stuck = self.is_full("resume") or (self.is_full("fresh") and not runs)
            waits_for_checkpoint = is_stuck and self.taken > self.freed
            if counts or waits_for_checkpoint:
                assert isinstance(answer, NotReady)
                assert answer.checkpoint_now == waits_for_checkpoint
            else:
                assert answer == Manifest(step, "", ())  # nothing is recorded
            return
        if strict and self.awaits_stragglers(*counts):
            assert isinstance(answer, NotReady)
            assert answer.awaits_stragglers
            return
        assert isinstance(answer, Manifest)
        assert answer.gids == [group.gid for group in groups]
        for group, entry in zip(groups, answer.entries, strict=True):
            if entry.version is not None:
                assert staleness(step, entry.version) < self.threshold
            assert entry.payload.token == group.result
            assert len(self.scene.run.buffer.read(entry.payload).states[0].response_ids) == 2 * len(
                group.made_by
            )
            group.stage = "taken"
            self.tasks[group.task].consumed += 1
        self.taken, self.batches[step], self.thresholds[step] = step, answer, self.threshold
        self.masks[step] = self.masks_of(answer)
        assert self.masks[step] == [self.mask(group, step) for group in groups]
        assert all(any(mask) for mask in self.masks[step])

    def masks_of(self, manifest: Manifest) -> list[list[int]]:
        return [group.mask.tolist() for group in self.scene.run.buffer.load(manifest)]

    def take_again(self, which: int) -> None:
        if not self.batches:
            return
        step = sorted(self.batches)[which % len(self.batches)]
        assert self.scene.take(step, math=9) == self.batches[step]
        assert self.masks_of(self.batches[step]) == self.masks[step]

    def take_a_wrong_step(self, step: int) -> None:
        if step in self.batches or step == self.taken + 1:
            return
        with pytest.raises(LedgerError):
            self.scene.run.ledger.take(self.scene.trainer, step, {"math": 1})

    def commit(self, behind: int, keep: int, slices: int = 0) -> None:
        """The trainer dies behind so many slices, of one group each (0: it does not)."""
        step = max(self.committed, self.taken - behind)
        keep = max(0, step - keep)
        with self.store.dying("commit" if slices else "nothing", slices):
            self.scene.run.ledger.commit(self.scene.trainer, step, keep)
        self.committed, self.keep = step, max(self.keep, keep)
        self.awaits = self.awaits if self.awaits > step else 0
        self.leaving |= {s: self.batches.pop(s).gids for s in sorted(self.batches) if s <= keep}
        archived = 0
        while min(self.leaving, default=keep + 1) <= keep and (not slices or archived < slices):
            self.archive_one()
            archived += 1
        # each slice frees what is archived as a whole
        self.forget()
        assert self.scene.run.ledger.steps() == (self.taken, self.committed, self.freed)

    def publish(self) -> None:
        weights = PolicyVersion(self.forks[-1][0], self.taken)
        self.scene.run.control.publish_weights(self.scene.trainer, weights, "/w", "")
        self.weights = weights

    def quarantine(self, which: int) -> None:
        """A group of a taken batch is no good: where it may not be taken out, it stays."""
        if not self.batches:
            return
        open_steps = [step for step in sorted(self.batches) if step > self.committed]
        steps = open_steps if open_steps and which % 4 else sorted(self.batches)
        step = steps[which // 4 % len(steps)]
        manifest = self.batches[step]
        if not manifest.entries:
            return
        entry = manifest.entries[which // 16 % len(manifest.entries)]
        ledger = self.scene.run.ledger
        nonce = self.scene.trainer
        if step <= self.committed:
            with pytest.raises(LedgerError):
                ledger.quarantine(nonce, step, entry, "bad")
            return
        bad = self.groups[entry.gid]
        ready = self.ready(bad.task, step, self.thresholds[step])
        gids = [gid for gid in manifest.gids if gid != bad.gid]
        if ready:
            gids.insert(manifest.gids.index(bad.gid), ready[0].gid)
            ready[0].stage = "taken"
        else:
            self.tasks[bad.task].consumed -= 1
        bad.stage = "dead"
        bad.token = ""
        self.batches[step] = ledger.quarantine(nonce, step, entry, "bad")
        assert self.batches[step].gids == gids
        self.masks[step] = self.masks_of(self.batches[step])
        before = self.totals()
        assert ledger.quarantine(nonce, step, entry, "bad") == self.batches[step]
        assert self.totals() == before
        for worker in WORKERS:  # a model of its own: invariants/running.py
            self.scene.run.fleet.unbar(worker)

    def refill(self, which: int) -> None:
        steps = [
            step
            for step, manifest in self.batches.items()
            if step > self.committed and manifest.open_places
        ]
        if not steps:
            return
        step = steps[which % len(steps)]
        manifest = self.batches[step]
        gids = list(manifest.gids)
        left = 0
        for task, places in manifest.open_places.items():
            ready = self.ready(task, step, self.thresholds[step])[:places]
            gids += [group.gid for group in ready]
            left += places - len(ready)
            self.tasks[task].consumed += len(ready)
            for group in ready:
                group.stage = "taken"
        ledger = self.scene.run.ledger
        nonce = self.scene.trainer
        assert isinstance(ledger.refill(nonce, step), NotReady) == (left > 0)
        self.awaits = step if left else 0
        found = ledger.manifest(step)
        assert found is not None
        assert (found.gids, found.open_places.total()) == (gids, left)
        self.batches[step], self.masks[step] = found, self.masks_of(found)
        before = self.totals()
        ledger.refill(nonce, step)
        assert self.totals() == before

    def restart_trainer(self, back: int) -> None:
        self.reopen(max(self.keep, self.taken - back))

    def restart_trainer_from_a_checkpoint_that_is_gone(self) -> None:
        if not self.keep:
            return
        with pytest.raises(LedgerError):
            self.scene.open_trainer(self.keep - 1, "never", take_over=True)

    def reopen(self, step: int) -> None:
        if self.scene.trainer:
            self.old_trainers.append(self.scene.trainer)
        lineage = f"t{next(self.lineages)}"
        self.scene.open_trainer(step, lineage, take_over=True)
        self.forks.append((lineage, step))
        self.committed = step
        self.awaits = 0

    def zombie_trainer(self, which: int) -> None:
        if not self.old_trainers:
            return
        nonce = self.old_trainers[which % len(self.old_trainers)]
        before = self.totals()
        for call in (
            lambda: self.scene.run.ledger.take(nonce, self.taken + 1, {"math": 1}, strict=False),
            lambda: self.scene.run.ledger.commit(nonce, self.taken, self.taken),
            lambda: self.scene.run.control.publish_weights(
                nonce, PolicyVersion("zombie", 0), "/w", ""
            ),
            lambda: self.scene.run.control.set_mode("trainer", Mode.RUN, nonce=nonce),
        ):
            with pytest.raises(Fenced):
                call()
        assert self.totals() == before
