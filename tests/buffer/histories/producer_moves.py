"""What a producer and a curator do: prompts in, groups again, groups from outside (I3, I8, I12)."""

from __future__ import annotations

from typing import Any

import pytest

from buffer.errors import GroupHeld, MemoryFull
from buffer.ids import IMPORTED_FROM, group_id
from buffer.wire.rollout import PolicyVersion, Status
from tests.buffer.histories.model import TASKS, Group
from tests.buffer.histories.world import World
from tests.buffer.scene import prompt, rollout


class ProducerMoves(World):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.outside = dict.fromkeys(TASKS, 0)

    def enqueue(self, task: str, samples: list[int], ahead: int) -> None:
        target = self.tasks[task].consumed + ahead
        room = self.room(task, target)
        refusal = self.refusal("fresh")
        started = 0
        drawn = 0
        if self.is_full("fresh") and self.at("waiting", task):
            refusal = refusal or "FULL"
        for number in samples:
            if started >= room or refusal or (started and self.is_full("fresh")):
                break
            gid = group_id(task, self.tasks[task].cursor + drawn)
            if gid in self.groups:  # after a loss: it came in before the cursor got there
                drawn += 1
                continue
            size = len(prompt(gid, number)) if number > 0 else 0
            stage = "waiting" if number > 0 else "skipped" if number else "dropped"
            self.groups[gid] = Group(gid, stage, prompt_bytes=size)
            drawn = drawn + 1
            started = started + (number > 0)
        self.tasks[task].cursor += drawn
        done = self.scene.enqueue(0, task=task, samples=samples, target=target)
        assert (done.count, done.cursor, done.refusal) == (
            started,
            self.tasks[task].cursor,
            refusal,
        )

    def reissue(self, task: str, status: str, ahead: int, limit: int) -> None:
        target = self.tasks[task].consumed + ahead
        chosen = self.pooled(status, task)[: min(self.room(task, target), limit)]
        chosen = [] if self.refusal("resume") else chosen
        assert self.scene.run.jobs.reissue(
            self.scene.producer, task, status, target, limit=limit
        ) == len(chosen)
        for group in chosen:
            group.stage = "waiting"
            group.lane = "resume"
            group.token = ""

    def put(self, task: str, status: str, age: int) -> None:
        """Groups without a lease; what is too old for the next step expires at once."""
        made = PolicyVersion(self.forks[-1][0], max(0, self.taken - age))
        state = rollout(Status(status), made)
        if 0 < self.high <= self.held():
            with pytest.raises(MemoryFull):
                self.scene.run.buffer.put(task, [[state]])
            return
        ((gid, stage),) = self.scene.run.buffer.put(task, [[state]]).items()
        group = self.come_in(task, status, [made])
        assert (gid, stage) == (group.gid, group.stage)

    def come_in(self, task: str, status: str, made_by: list[PolicyVersion]) -> Group:
        """What is in by now, under the next draw of those from outside."""
        gid = group_id(task, IMPORTED_FROM + self.outside[task])
        self.outside[task] += 1
        group = self.groups[gid] = Group(gid, status, made_by=made_by)
        if self.score(group) < self.cut or status == "expired":
            group.stage, group.made_by = (
                "expired" if self.on_straggler == "retry" else "dropped",
                [],
            )
        if group.stage != "dropped":
            self.arrive(group)
            group.result = self.newest(group).token
            group.prompt_bytes = self.stored_bytes(gid, "init")
            group.result_bytes = self.stored_bytes(gid, group.result)
        return group

    def update(self, which: int, status: str, age: int) -> None:
        """Other rollouts for a pooled group; anything else is refused."""
        group = self.some_group(which)
        if group is None:
            return
        made = PolicyVersion(self.forks[-1][0], max(0, self.taken - age))
        states = [rollout(Status(status), made)]
        if group.stage not in ("completed", "aborted", "expired"):
            with pytest.raises(GroupHeld):
                self.scene.run.buffer.update(group.gid, states)
            return
        self.scene.run.buffer.update(group.gid, states)
        group.stage, group.made_by, group.result = status, [made], self.newest(group).token
        group.result_bytes = self.stored_bytes(group.gid, group.result)
