"""What a server does that loses its last writes, and a trainer that tells it again what its
checkpoint knows (I6).
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from typing import Any

from buffer.ids import IMPORTED_FROM, group_id, split_group_id
from buffer.job import PayloadRef
from buffer.ledger.ended_draws import note_draws
from buffer.ledger.position import Position
from buffer.ledger.trainer_opening import Opening
from buffer.manifest import Manifest
from buffer.wire.rollout import PolicyVersion
from tests.buffer.histories.control_moves import ControlMoves
from tests.buffer.histories.model import TASKS, Group
from tests.buffer.histories.producer_moves import ProducerMoves
from tests.buffer.histories.trainer_moves import TrainerMoves
from tests.buffer.histories.worker_moves import WorkerMoves
from tests.buffer.time_machine import Moment, put_back, remember

STEPS = (
    "forks", "weights", "taken", "keep", "committed", "batches", "leaving", "masks", "thresholds",
    "awaits",
)  # fmt: skip
LIMITS = ("threshold", "max_tries", "low", "high", "open_lanes", "modes", "acknowledged")
LOST = ("groups", "tasks", "outside", *STEPS, *LIMITS)
"""What of the model is on the server."""


class ServerMoves(ProducerMoves, ControlMoves, WorkerMoves, TrainerMoves):
    """`trained`: the batches that made the weights of the newest checkpoint, whose position is
    `position`.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        self.position = Position()
        self.trained = dict[int, Manifest]()
        self.made: dict[tuple[str, str], list[PolicyVersion]] = {}
        self.thresholds_of_trained: dict[int, int] = {}
        self.moments: dict[int, tuple[str, Moment, dict[str, Any]]] = {}
        super().__init__(*args, **options)

    def commit(self, behind: int, keep: int, slices: int = 0) -> None:
        before = self.trained | self.batches
        super().commit(behind, keep, slices)
        self.write_checkpoint(before, self.committed)

    def reopen(self, step: int) -> None:
        super().reopen(step)
        self.write_checkpoint(self.trained | self.batches, step)

    def write_checkpoint(self, batches: dict[int, Manifest], step: int) -> None:
        self.trained = {number: batches[number] for number in range(1, step + 1)}
        self.thresholds_of_trained |= self.thresholds
        position = Position()
        note_draws(self.scene.run.context, position)
        assert position.cursors == {task: self.tasks[task].cursor for task in TASKS}
        for manifest in self.trained.values():
            position.add(manifest)
            for entry in manifest.entries:
                self.made.setdefault(
                    (entry.gid, entry.payload.token), list(self.groups[entry.gid].made_by)
                )
        position.forget(self.keep)
        self.position = Position.model_validate_json(position.model_dump_json())

    def remember(self, slot: int) -> None:
        model = {name: deepcopy(getattr(self, name)) for name in LOST}
        self.moments[slot] = self.scene.name, remember(self.scene.raw, self.scene.name), model

    def lose_a_change(self, steps: int, which: int, keep: int, lives: int) -> None:
        """A group was found bad and its batch was trained without it; the server only knows the
        batch as it was.
        """
        for _ in range(steps):
            self.take(2, 1, strict=False)
        self.remember(0)
        self.quarantine(which)
        self.commit(0, keep)
        self.lose(0, lives)

    def lose(self, slot: int, lives: int) -> None:
        """The server is as it was then; workers go on with what they have, a trainer opens the
        newest checkpoint. The first one that tries dies behind so many calls (0: none does).
        """
        name, keys, model = self.moments.get(slot, ("", {}, {}))
        if name != self.scene.name:  # another run by now
            return
        put_back(self.scene.raw, self.scene.name, keys)
        for name, value in model.items():
            setattr(self, name, deepcopy(value))
        for worker, jobs in self.jobs.items():
            self.jobs[worker] = [job for job in jobs if job.gid in self.groups]
        for worker, nonce in self.scene.nonces.items():
            self.scene.run.fleet.register(worker, nonce, {"engine": "none"})
        self.scene.run.refresh_limits()
        self.old_producers.append(self.scene.producer)
        self.scene.open_producer(take_over=True)
        self.open_checkpoint(lives)
        self.check_totals()

    # -- what the opening must do ---------------------------------------------------------------

    def open_checkpoint(self, lives: int) -> None:
        if self.leaving:
            self.end_commit()
        dissolved = self.dissolve()
        whole = self.restorable()
        first = min(whole, default=max(self.taken, self.position.step) + 1)
        kept = [self.trained[step] for step in whole]
        if first > self.taken + 1:
            for manifest in self.batches.values():
                self.archive(manifest.gids)
            self.forget()
            self.batches = {}
            self.keep = first - 1
            self.taken = first - 1
            for task in TASKS:
                self.tasks[task].consumed = sum(self.count(task, step) for step in range(1, first))
        living = {gid for manifest in (*kept, *self.batches.values()) for gid in manifest.gids}
        self.archive(
            gid for manifest in self.trained.values() for gid in manifest.gids if gid not in living
        )
        self.skip(living)
        if lives:
            with self.store.dying("", lives):
                self.open_with_position()
        opening = self.open_with_position()
        # whoever comes by frees what a trainer that died did not
        self.scene.run.ledger.archive.forget()
        self.forget()
        for manifest in sorted(kept, key=lambda manifest: manifest.step):
            self.restore(manifest)
        if not lives:
            assert (opening.recovery.dissolved, opening.recovery.restored) == (
                dissolved,
                len(whole),
            )
        assert self.scene.run.ledger.steps() == (self.taken, self.committed, self.keep)

    def open_with_position(self) -> Opening:
        self.old_trainers.append(self.scene.trainer)
        lineage = f"t{next(self.lineages)}"
        nonce = f"trainer-{lineage}"
        position = self.position.model_copy(deep=True)
        self.scene.trainer = nonce
        self.committed = position.step
        self.awaits = 0
        self.forks.append((lineage, position.step))
        return self.scene.run.trainers.open(
            nonce, lineage=lineage, take_over=True, position=position
        )

    def end_commit(self) -> None:
        while self.leaving:
            self.archive_one()
        self.forget()

    def dissolve(self) -> int:
        """Let go of the batches from the first one on that the checkpoint's history does not go on
        with.
        """
        trained = {gid for manifest in self.trained.values() for gid in manifest.gids}
        wrong = [step for step in sorted(self.batches) if not self.is_history(step, trained)]
        steps = [step for step in self.batches if wrong and step >= wrong[0]]
        for step in steps:
            for gid in self.batches.pop(step).gids:
                group = self.groups[gid]
                group.stage = "completed"
                self.tasks[group.task].consumed -= 1
        self.taken -= len(steps)
        return len(steps)

    def is_history(self, step: int, trained: set[str]) -> bool:
        gids = set(self.batches[step].gids)
        if step in self.position.batches:
            return payloads(self.batches[step]) == payloads(self.trained[step])
        if step > self.position.step:
            return not gids & trained
        return gids <= trained and not any(
            gids & set(self.trained[other].gids) for other in self.position.batches
        )

    def restorable(self) -> set[int]:
        steps = set[int]()
        for step in range(self.position.step, self.taken, -1):
            if step not in self.position.batches or not self.is_whole(self.trained[step]):
                break
            steps.add(step)
        return steps

    def is_whole(self, manifest: Manifest) -> bool:
        return all(
            entry.gid in self.groups
            and self.readable(self.groups[entry.gid])
            and self.stored_bytes(entry.gid, entry.payload.token) == entry.payload.size
            for entry in manifest.entries
        )

    def restore(self, manifest: Manifest) -> None:
        for entry in manifest.entries:
            group = self.groups[entry.gid]
            token = entry.payload.token
            if group.result != token:
                group.unstamped = token, entry.version
            group.stage = "taken"
            group.token = group.lane = ""
            group.result = token
            group.made_by = list(self.made[entry.gid, token])
            group.result_bytes = entry.payload.size
            if not group.arrival:
                self.arrive(group)
            self.tasks[group.task].consumed += 1
        self.taken = manifest.step
        self.batches[manifest.step] = manifest
        self.thresholds[manifest.step] = self.thresholds_of_trained[manifest.step]
        self.masks[manifest.step] = self.masks_of(manifest)

    def count(self, task: str, step: int) -> int:
        return sum(split_group_id(gid)[0] == task for gid in self.trained[step].gids)

    def skip(self, living: set[str]) -> None:
        """What the checkpoint knows to be skipped is not drawn again."""
        for task, draws in self.position.skipped.items():
            for gid in (group_id(task, int(n)) for n in draws.to_bools().nonzero()[0]):
                if gid not in living:
                    group = self.groups.setdefault(gid, Group(gid))
                    group.stage, group.token, group.result = "skipped", "", ""

    def archive(self, gids: Iterable[str]) -> None:
        for gid in sorted(gids):
            task, draw = split_group_id(gid)
            for number in range(self.outside[task], draw - IMPORTED_FROM):
                # put after the moment, and not trained: it cannot be had back
                lost = group_id(task, IMPORTED_FROM + number)
                self.groups[lost] = Group(lost, "dropped")
            self.outside[task] = max(self.outside[task], draw - IMPORTED_FROM + 1)
            group = self.groups.setdefault(gid, Group(gid))
            group.stage = "archived"
            group.token = ""


def payloads(manifest: Manifest) -> list[PayloadRef]:
    return [entry.payload for entry in manifest.entries]
