"""What teachers do with completed groups, and zombies of them (I1, I2, I11, I13)."""

from __future__ import annotations

from typing import Any

import pytest

from buffer.control.control import Mode
from buffer.errors import Fenced
from tests.buffer.histories.model import TEACHERS, Group
from tests.buffer.histories.worker_moves import WorkerMoves


class TeacherMoves(WorkerMoves):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.scene.teachers = dict(TEACHERS)

    def submit_to_teachers(self, worker: str, which: int, number: int) -> None:
        """A student's group goes to one teacher, or to both; it is counted as one that arrives."""
        if self.tokens is not None:
            return  # the model has no age of single tokens for a group that waits or runs
        self.hold(worker)
        owned = [job for job in self.jobs[worker] if self.owns(job)]
        if not owned:
            return
        job = owned[which % len(owned)]
        group, made = self.groups[job.gid], self.engines[worker]
        names = list(TEACHERS.values())[:number]
        self.scene.submit(job, made, worker=worker, begun=self.begun(job), teachers=names)
        group.made_by = [*group.made_by, made]
        group.sampled_by = worker
        self.accept(group, job.token, names)
        self.arrive(group)

    def accept(self, group: Group, token: str, teachers: list[str]) -> None:
        """A result is there: it waits for the first of the teachers, or is ready."""
        is_taught = group.lane.startswith("teach.")  # a teacher adds no tokens
        group.result, group.tries = token, group.tries - 1 if is_taught else 0
        group.best = 0
        group.result_bytes = self.stored_bytes(group.gid, token)
        group.place, group.lane, group.to_come = "completed", "", []
        if teachers:
            group.place, group.lane, group.to_come = "waiting", f"teach.{teachers[0]}", teachers[1:]

    def teach(self, worker: str, which: int) -> None:
        """A teacher submits a group; or, as a zombie, one that it lost, or submitted before."""
        self.hold(worker)
        if not self.jobs[worker]:
            return
        job, group, owned = self.pick(worker, which)
        if not self.readable(group):
            return
        before, accepted = self.totals(), job.token in (group.result, group.replaced)
        if owned:
            replaced = group.result
            self.scene.teach(job, worker)
            self.accept(group, job.token, group.to_come)
            group.replaced = replaced
            assert self.scene.record(job.gid)["owner"] == (
                group.sampled_by if group.place == "completed" else ""
            )
            return
        group_again = self.scene.taught(job, self.scene.payload(job.gid))
        if accepted:
            self.scene.run.buffer.submit(worker, job, group_again, 0)
        else:
            with pytest.raises(Fenced):
                self.scene.run.buffer.submit(worker, job, group_again, 0)
        assert self.totals() == before

    def claim(self, worker: str, limit: int) -> None:
        if worker not in TEACHERS:
            super().claim(worker, limit)
            return
        lane = f"teach.{TEACHERS[worker]}"
        waiting = [group for group in self.at("waiting") if group.lane == lane]
        if self.modes["operator"] is not Mode.RUN:
            waiting = []  # no memory mark and no trainer stops it
        claim = self.scene.claim_of(worker, limit)
        assert (claim.refusal == "PAUSED") == (self.modes["operator"] is not Mode.RUN)
        assert len(claim.jobs) == min(limit, len(waiting))
        self.begin(worker, claim.jobs)
