"""What workers do, and zombies of them with their old tokens (I2, I11, I13)."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from buffer.control.control import Mode
from buffer.errors import Fenced
from buffer.groups.kept_turns import KeptTurns
from buffer.ids import new_nonce
from buffer.job import Job, SampledTokens
from buffer.wire.group import RolloutGroup
from buffer.wire.rollout import PolicyVersion, Status
from producer_workers.worker.token_counts import TokenCounts
from tests.buffer.histories.model import TAIL_TRIES, WORKERS, Group
from tests.buffer.histories.world import World
from tests.buffer.scene import FIRST, extend, turn


class WorkerMoves(World):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.engines = dict.fromkeys(WORKERS, FIRST)
        self.jobs: dict[str, list[Job]] = {name: [] for name in self.engines}
        self.acknowledged: dict[str, tuple[str | None, int]] = {}
        self.kept: dict[tuple[str, str, str], tuple[KeptTurns, list[PolicyVersion]]] = {}
        """by run, group and claim, with the weights of all tokens that its worker knows"""
        self.counts: dict[str, TokenCounts] = {}
        """by token of a process"""

    def load_weights(self, worker: str) -> None:
        self.engines[worker] = self.weights

    def claim(self, worker: str, limit: int) -> None:
        waiting = self.at("waiting")
        token = new_nonce()
        nonce = self.scene.worker(worker)
        answer = self.scene.run.jobs.claim(worker, nonce, token, self.engines[worker], limit)
        if not self.lanes:
            assert (answer.refusal, answer.jobs) == ("PAUSED", [])
            return
        if self.engines[worker] != self.weights:
            assert (answer.refusal, answer.jobs) == ("STALE", [])
            self.engines[worker] = self.weights
            return
        lanes = self.granted(limit)
        assert [job.lane for job in answer.jobs] == lanes
        is_full = any(group.lane in self.lanes for group in waiting) and not lanes
        assert answer.refusal == ("FULL" if is_full else None)
        again = self.scene.run.jobs.claim(worker, nonce, token, self.engines[worker], limit)
        assert again.jobs == answer.jobs or not answer.jobs
        self.begin(worker, answer.jobs)

    def begin(self, worker: str, jobs: list[Job]) -> None:
        for job in jobs:
            group = self.groups[job.gid]
            assert (group.stage, group.result) == ("waiting", job.payload.token)
            group.stage = "running"
            group.token = job.token
            group.owner = worker
            group.tries = group.tries + 1
            assert job.tries == group.tries
        self.jobs[worker] += jobs

    def pick(self, worker: str, which: int) -> tuple[Job, Group, bool]:
        """A job this worker once claimed, and whether it still is its own; more often one that is."""
        owned = [job for job in self.jobs[worker] if self.owns(job)]
        choice = owned if owned and which % 4 else self.jobs[worker]
        job = choice[which // 4 % len(choice)]
        return job, self.groups[job.gid], self.owns(job)

    def owns(self, job: Job) -> bool:
        group = self.groups[job.gid]
        return (group.stage, group.token) == ("running", job.token)

    def heartbeat(self, worker: str) -> None:
        lost = [job.gid for job in self.jobs[worker] if not self.owns(job)]
        counts = self.counts.get(self.scene.worker(worker))
        for job in self.jobs[worker]:
            if counts and self.owns(job):
                self.sampled(worker, job, 1)
        totals = counts.text() if counts else ""
        beat = self.scene.beat(self.jobs[worker], worker, sampled=totals)
        assert [job.gid for job in beat.lost] == lost
        for gid in lost:
            if counts:
                counts.end(gid)

    def acknowledge(self, worker: str) -> None:
        """A receipt for a pause that stops work counts once nothing is held; a late one of an older
        epoch never.
        """
        epoch = self.scene.run.control.state().epoch
        record = self.scene.keys.worker(worker)
        is_busy = any(group.owner == worker for group in self.at("running"))
        is_silent = is_busy and self.mode in (Mode.DRAIN, Mode.ABORT)
        if is_silent and self.acknowledged.get(worker) == (self.scene.nonces.get(worker), epoch):
            is_silent = False  # it was given before something was claimed in a lane that is open
        for ack in (epoch, epoch - 1):
            self.scene.beat(self.jobs[worker], worker, ack=ack)
            assert (int(self.scene.raw.hget(record, "ack")) < epoch) == is_silent
        if not is_silent:
            self.acknowledged[worker] = self.scene.nonces[worker], epoch

    def hold(self, worker: str) -> None:
        """Begin something, if nothing is held and something waits."""
        if not any(self.owns(job) for job in self.jobs[worker]):
            self.load_weights(worker)
            self.claim(worker, 2)

    def keep_turns(self, worker: str, which: int, number: int) -> None:
        """Agents of a group say something, also those of a worker that lost it."""
        if self.tokens is not None:
            return  # the model has no age of single tokens for a group that runs
        self.hold(worker)
        if not self.jobs[worker]:
            return
        job, group, owned = self.pick(worker, which)
        name = self.scene.name, job.gid, job.token
        if owned and name not in self.kept:
            kept = self.scene.run.buffer.keep_turns(job, self.begun(job))
            self.kept[name] = kept, list(group.made_by)
        if name not in self.kept:
            return
        kept, made_by = self.kept[name]
        made = self.engines[worker]
        for _ in range(number):
            kept.add(turn(1, made))
            self.sampled(worker, job, 1)
            made_by.append(made)
        if not owned:
            before = self.totals()
            with pytest.raises(Fenced):
                kept.store()
            assert self.totals() == before
            return
        kept.store()
        ref = self.newest(group)
        assert ref.token.startswith(f"{job.token}-turns")
        if not group.result.startswith(f"{job.token}-turns"):
            tokens = len(group.made_by)
            group.best = max(group.best, tokens) if group.result != "init" else 0
        group.made_by, group.result = list(made_by), ref.token
        group.result_bytes = self.stored_bytes(job.gid, ref.token)

    def sampled(self, worker: str, job: Job, tokens: int) -> SampledTokens:
        """What the engine of the worker's process has made, `tokens` more for this claim."""
        counts = self.counts.setdefault(self.scene.worker(worker), TokenCounts())
        with counts.request(job.gid, 3) as tally:
            tally.tokens = tokens
        return counts.of(job.gid)

    def closed(self, worker: str, job: Job) -> None:
        """The server has answered how a claim ended."""
        self.counts[self.scene.worker(worker)].end(job.gid)

    def begun(self, job: Job) -> RolloutGroup:
        """A group as its worker has it: its turns are in its rollouts."""
        group = self.scene.run.buffer.read(self.scene.payload(job.gid))
        for state in group.turns:
            span = state.spans[0]
            made = PolicyVersion(span.lineage, span.version)
            group = extend(group, Status.ABORTED, made)
        return group

    def submit(self, worker: str, which: int, outcome: str) -> None:
        if not self.jobs[worker]:
            return
        job, group, owned = self.pick(worker, which)
        made = self.engines[worker]
        if not owned:
            self.submit_again(worker, job, group, outcome, made)
            return
        status = Status.ABORTED if outcome == "aborted" else Status.COMPLETED
        is_filtered, begun = outcome == "filtered", self.begun(job)
        self.scene.submit(
            job, made, status=status, filtered=is_filtered, worker=worker, begun=begun,
            sampled=self.sampled(worker, job, 2 * len(begun) + which % 3),
        )  # fmt: skip
        self.closed(worker, job)
        group.made_by, group.stage, group.result = [*group.made_by, made], outcome, job.token
        group.result_bytes = self.stored_bytes(job.gid, job.token)
        group.tries = group.best = 0
        group.aborts += outcome == "aborted"
        self.arrive(group)

    def submit_again(
        self, worker: str, job: Job, group: Group, outcome: str, made: PolicyVersion
    ) -> None:
        """A zombie, or a reply that was lost: nothing may change."""
        before = self.totals()
        if not self.readable(group):
            return
        result = extend(self.scene.run.buffer.read(self.newest(group)), Status.COMPLETED, made)
        accepted = job.token == group.result
        try:
            sampled = self.sampled(worker, job, 2)
            self.scene.run.buffer.submit(
                worker, job, result, 4, filtered=outcome == "filtered", sampled=sampled
            )
        except Fenced:
            assert not accepted
        else:
            assert accepted
        assert self.totals() == before

    def release(self, worker: str, which: int, kind: Any) -> None:
        self.hold(worker)
        if not self.jobs[worker]:
            return
        job, group, owned = self.pick(worker, which)
        if not owned:
            before = self.totals()
            with contextlib.suppress(Fenced):  # a reply that was lost is said again
                sampled = self.sampled(worker, job, 1)
                self.scene.run.jobs.release(worker, job, kind, sampled=sampled)
            assert self.totals() == before
            return
        sampled = self.sampled(worker, job, which % 5)
        self.scene.run.jobs.release(worker, job, kind, sampled=sampled)
        self.closed(worker, job)
        group.released = job.token
        if kind in ("failed", "lost"):
            self.wait_or_die(group)
            return
        group.tries -= 1
        group.token = ""
        if kind == "skipped":
            group.stage = "skipped"
            group.result = ""
        elif kind == "aborted":
            group.aborts += 1
            # interrupted too often, and without tokens to lose: it waits for the tail batch
            group.stage = (
                "expired" if group.aborts >= TAIL_TRIES and group.result == "init" else "aborted"
            )
            self.arrive(group)
        else:
            group.stage = "waiting"
            group.lane = "resume"

    def keep_responses(self, worker: str, which: int) -> None:
        jobs = [job for job in self.jobs[worker] if job.token == self.groups[job.gid].released]
        if not jobs:
            return
        job = jobs[which % len(jobs)]
        group = self.groups[job.gid]
        if not self.readable(group):
            return
        if group.result != job.token and self.stored_bytes(job.gid, job.token):
            return  # a worker that submits its group does not keep other responses of it
        made = self.engines[worker]
        result = extend(self.scene.run.buffer.read(job.prompt), Status.FAILED, made)
        if self.scene.run.dead_letters.keep_responses(job, result):
            assert group.stage == "dead"
            group.made_by, group.result = [made], job.token
            group.result_bytes = self.stored_bytes(job.gid, job.token)
        elif group.stage == "dead":
            assert self.scene.run.limits.low_bytes
            group.released = ""

    def leases_run_out(self, worker: str) -> None:
        self.hold(worker)
        held = [g for g in self.at("running") if g.owner == worker]
        if held:
            self.scene.expire_leases(worker)
        assert self.scene.run.jobs.reap().groups == len(held)
        for group in held:
            self.take_back(group)

    def fence(self, worker: str) -> None:
        self.hold(worker)
        held = [g for g in self.at("running") if g.owner == worker]
        assert self.scene.run.fleet.fence(worker) == len(held)
        self.scene.nonces.pop(worker, None)
        for group in held:
            self.take_back(group)
