"""What falls due, done by whoever comes first; and a server whose clock steps (I8, I11, I12)."""

from __future__ import annotations

from tests.buffer.machine.model import TASKS, WORKERS
from tests.buffer.machine.worker_moves import WorkerMoves


class JanitorMoves(WorkerMoves):
    def refresh(self, task: str, limit: int) -> None:
        assert self.scene.run.buffer.refresh_staleness(task, limit=limit) == {task: self.expire(task)}

    def sweep(self, worker: str, is_silent: bool) -> None:
        """All of it at once: leases of a silent worker, age, garbage."""
        held = [g for g in self.at("running") if is_silent and g.owner == worker]
        if held:
            self.scene.expire_leases(*[group.gid for group in held])
        swept = self.scene.run.janitor.sweep()
        for group in held:
            self.wait_or_die(group)
        buried = sum(group.place == "dead" for group in held)
        assert (swept.reaped, swept.buried) == (len(held) - buried, buried)
        self.forget()
        assert swept.expired == self.expire(*TASKS)
        assert not self.scene.garbage()

    def collect_garbage(self) -> None:
        while self.scene.run.payloads.collect(3):
            pass

    def clock_steps(self, ms: int) -> None:
        """The server's clock is `ms` further at once, or back: nobody loses a lease who beats in the next one."""
        now, keys = self.scene.now_ms(), self.scene.keys
        renewed = {job.gid for jobs in self.jobs.values() for job in jobs if self.owns(job)}
        for key in (keys.leases, keys.workers):
            for member in self.scene.raw.zrange(key, 0, -1):
                # a lease that nobody renews would be the next one to be reaped, which is another story
                if key == keys.workers or member.decode() in renewed:
                    self.scene.raw.zincrby(key, -ms, member)
        self.scene.raw.hset(keys.clock, mapping={"seen_ms": now - ms, "grace_until_ms": 0})
        lease_ms = self.scene.run.limits.lease_ms
        reaped = self.scene.run.jobs.reap()
        assert (reaped.groups, reaped.gone_workers) == (0, 0)
        assert (reaped.grace_ms > 0) == (not 0 <= ms <= lease_ms / 2)
        for worker in WORKERS:
            self.heartbeat(worker)
        ends = self.scene.raw.zrange(keys.leases, 0, -1, withscores=True)
        assert all(0 < end - now <= 2 * lease_ms for _, end in ends)
