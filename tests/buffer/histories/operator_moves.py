"""What somebody does by hand to one group (I11)."""

from __future__ import annotations

import pytest

from buffer.errors import GroupHeld
from buffer.ids import POOLS
from tests.buffer.histories.world import World


class OperatorMoves(World):
    def requeue(self, which: int) -> None:
        group = self.some_group(which)
        if group is None:
            return
        before = group.stage
        if before not in ("waiting", "dead", "completed", "aborted", "expired"):
            with pytest.raises(GroupHeld):
                self.scene.run.jobs.requeue(group.gid)
            return
        assert self.scene.run.jobs.requeue(group.gid) == before
        if before == "waiting":
            return
        group.stage = "waiting"
        group.lane = "resume"
        group.token = ""
        group.tries = 0
        group.released = ""
        if before != "aborted" and group.lane == "resume":
            group.made_by, group.result = [], "init"

    def delete(self, task: str, staleness: int) -> None:
        """End what a question finds in the pools."""
        pooled = [group for stage in POOLS for group in self.at(stage, task) if group.made_by]
        found = [group for group in pooled if self.taken - self.version(group) >= staleness]
        assert self.scene.run.delete({"task": task, "staleness": {"$gte": staleness}}) == len(found)
        for group in found:
            group.stage = "dropped"
            group.result = ""

    def drop(self, which: int, by_name: bool) -> None:
        group = self.some_group(which)
        if group is None:
            return
        before = group.stage
        revoke = group.owner if by_name else ""
        if before in ("taken", "archived", "filtered", "skipped") or (
            before == "running" and not by_name
        ):
            with pytest.raises(GroupHeld):
                self.scene.run.jobs.drop(group.gid, revoke=revoke)
            return
        assert self.scene.run.jobs.drop(group.gid, revoke=revoke) == before
        group.stage = "dropped"
        group.token = ""
        group.result = ""
