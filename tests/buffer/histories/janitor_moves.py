"""What falls due, done by whoever comes first; and a server whose clock steps (I8, I11, I12)."""

from __future__ import annotations

from unittest.mock import patch

from tests.buffer.histories.model import LEASE_MS, TASKS, WORKERS
from tests.buffer.histories.worker_moves import WorkerMoves


class JanitorMoves(WorkerMoves):
    def refresh(self, task: str, limit: int) -> None:
        with patch("buffer.groups.replay_buffer.GROUPS_PER_CALL", limit):
            moved = self.scene.run.buffer.refresh_staleness(task)
        assert moved == {task: self.expire(task)}

    def sweep(self, worker: str, is_silent: bool) -> None:
        """All of it at once: leases of a silent worker, age, garbage."""
        held = [g for g in self.at("running") if is_silent and g.owner == worker]
        if held:
            self.scene.expire_leases(worker)
        swept = self.scene.run.janitor.sweep()
        for group in held:
            self.take_back(group)
        buried = sum(group.stage == "dead" for group in held)
        assert (swept.reaped, swept.buried) == (len(held) - buried, buried)
        self.forget()
        assert swept.expired == self.expire(*TASKS) + self.expire_waiting()
        assert not self.scene.garbage()

    def collect_garbage(self) -> None:
        while self.scene.run.payloads.collect(3):
            pass

    def clock_steps(self, leases: float) -> None:
        """The server's clock is so many leases further, or back: nobody loses one who beats in the
        next one.
        """
        ms = int(leases * LEASE_MS)
        now = self.scene.now_ms()
        keys = self.scene.keys
        for key in (keys.leases, keys.workers):
            for member in self.scene.raw.zrange(key, 0, -1):
                self.scene.raw.zincrby(key, -ms, member)
        self.scene.raw.hset(keys.clock, mapping={"seen_ms": now - ms, "grace_until_ms": 0})
        reaped = self.scene.run.jobs.reap()
        assert (reaped.groups, reaped.gone_workers) == (0, 0)
        assert (reaped.grace_ms > 0) == (not 0 <= leases <= 0.5)
        # a deadline of a clock that stepped back comes nearer
        assert all(
            end - now <= 2 * LEASE_MS
            for _, end in self.scene.raw.zrange(keys.leases, 0, -1, withscores=True)
        )
        for worker in WORKERS:
            self.heartbeat(worker)
        ends = self.scene.raw.zrange(keys.leases, 0, -1, withscores=True)
        assert all(0 < end - now <= 2 * LEASE_MS for _, end in ends)
