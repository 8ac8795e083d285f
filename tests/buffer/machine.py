"""A run and a plain Python model of it that knows where every group must be (I1 to I8, I11, I13).

Two workers and a trainer that dies and comes back; zombies of all of them go on with their old tokens and nonces.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import pytest
import redis

from buffer import Job, Manifest, NotReady, PolicyVersion, RunLimits, Status, Store, TaskLimits, group_id, new_nonce
from buffer.errors import Fenced, GroupHeld, LedgerError
from buffer.staleness import staleness
from tests.buffer.scene import FIRST, Scene, extend

TASKS = ("math", "code")
WORKERS = ("w0", "w1")
THRESHOLD, MAX_TRIES = 2, 2
PLACES = ("waiting", "running", "completed", "aborted", "expired", "taken", "archived", "dead", "filtered", "dropped")
TIMELESS = float("inf")


@dataclass
class Group:
    """What the model knows of one group. `made_by`: the weights of its tokens that count."""

    gid: str
    place: str = "waiting"
    lane: str = "fresh"
    token: str = ""
    owner: str = ""
    result: str = "init"
    tries: int = 0
    arrival: int = 0
    made_by: list[PolicyVersion] = field(default_factory=list)

    @property
    def task(self) -> str:
        return self.gid.rpartition("-")[0]


@dataclass
class Task:
    cursor: int = 0
    consumed: int = 0
    arrivals: int = 0


class Machine:
    """Every method without an underscore makes one move on the server and in the model, and compares the outcome."""

    def __init__(self, store: Store, raw: redis.Redis, name: str, tail_batch: int, order: str = "staleness") -> None:
        limits = RunLimits(
            stale_threshold=THRESHOLD,
            max_tries=MAX_TRIES,
            tail_batch_trigger_size=tail_batch,
            order=order,
            tasks={task: TaskLimits() for task in TASKS},
        )
        self.scene = Scene(store, raw, name, limits)
        self.retried, self.order = tail_batch >= 0, order
        self.groups: dict[str, Group] = {}
        self.tasks = {name: Task() for name in TASKS}
        self.forks: list[tuple[str, int]] = []
        self.batches: dict[int, Manifest] = {}
        self.taken = self.keep = self.committed = 0
        self.weights = FIRST
        self.engines = dict.fromkeys(WORKERS, FIRST)
        self.jobs: dict[str, list[Job]] = {name: [] for name in WORKERS}
        self.old_trainers: list[str] = []
        self.lineages = count(1)
        self.scene.open_producer()
        self.reopen(0)

    # -- the model's arithmetic ---------------------------------------------------

    def at(self, place: str, task: str | None = None) -> list[Group]:
        return [g for g in self.groups.values() if g.place == place and task in (None, g.task)]

    def version(self, group: Group) -> float:
        """M as it counts: no later than any fork after the lineage that made the tokens."""
        return min((self.living(made) for made in group.made_by), default=TIMELESS)

    def living(self, made: PolicyVersion) -> int:
        names = [name for name, _ in self.forks]
        later = self.forks[names.index(made.lineage) + 1 :] if made.lineage in names else self.forks
        return min([made.version, *(step for _, step in later)])

    def pooled(self, place: str, task: str) -> list[Group]:
        """A pool in its order."""
        return sorted(self.at(place, task), key=lambda g: (self.version(g), g.arrival))

    def fresh(self, task: str) -> list[Group]:
        """The completed groups that the next step may use, in order."""
        return self.ready(task, self.taken + 1)

    def ready(self, task: str, step: int) -> list[Group]:
        """The completed groups that `step` may use, in the order of the run's policy."""
        fresh = [g for g in self.pooled("completed", task) if self.version(g) >= step - THRESHOLD]
        match self.order:
            case "fifo":
                fresh.sort(key=lambda g: g.arrival)
            case "freshest":
                fresh.reverse()
        return fresh

    def room(self, task: str, target: int) -> int:
        busy = len(self.at("waiting", task)) + len(self.at("running", task)) + len(self.fresh(task))
        return max(0, target - self.tasks[task].consumed - busy)

    def arrive(self, group: Group) -> None:
        self.tasks[group.task].arrivals += 1
        group.arrival = self.tasks[group.task].arrivals

    def wait_or_die(self, group: Group) -> None:
        """A try was used up."""
        alive = group.tries < MAX_TRIES
        group.place, group.lane, group.token = ("waiting", "resume", "") if alive else ("dead", "", "")

    # -- producer -------------------------------------------------------------------

    def enqueue(self, task: str, samples: list[int], ahead: int) -> None:
        target = self.tasks[task].consumed + ahead
        room, started, drawn = self.room(task, target), 0, 0
        for number in samples:
            if started >= room:
                break
            gid = group_id(task, self.tasks[task].cursor + drawn)
            self.groups[gid] = Group(gid, "waiting" if number else "dropped")
            drawn, started = drawn + 1, started + bool(number)
        self.tasks[task].cursor += drawn
        done = self.scene.enqueue(0, task=task, samples=samples, target=target)
        assert (done.count, done.cursor) == (started, self.tasks[task].cursor)

    def reissue(self, task: str, status: str, ahead: int, limit: int) -> None:
        target = self.tasks[task].consumed + ahead
        chosen = self.pooled(status, task)[: min(self.room(task, target), limit)]
        assert self.scene.run.jobs.reissue(self.scene.producer, task, status, target, limit=limit) == len(chosen)
        for group in chosen:
            group.place, group.lane, group.token = "waiting", "resume", ""

    # -- workers ----------------------------------------------------------------------

    def claim(self, worker: str, limit: int) -> None:
        waiting = self.at("waiting")
        token, nonce = new_nonce(), self.scene.worker(worker)
        answer = self.scene.run.jobs.claim(worker, nonce, token, self.engines[worker], limit)
        if self.engines[worker] != self.weights:
            assert (answer.refusal, answer.jobs) == ("STALE", [])
            self.engines[worker] = self.weights
            return
        assert len(answer.jobs) == min(limit, len(waiting))
        resumed = sum(group.lane == "resume" for group in waiting)
        lanes = ["resume"] * resumed + ["fresh"] * limit
        assert [job.lane for job in answer.jobs] == lanes[: len(answer.jobs)]
        again = self.scene.run.jobs.claim(worker, nonce, token, self.engines[worker], limit)
        assert again.jobs == answer.jobs or not answer.jobs
        for job in answer.jobs:
            group = self.groups[job.gid]
            assert (group.place, group.result) == ("waiting", job.payload.token)
            group.place, group.token, group.owner, group.tries = "running", job.token, worker, group.tries + 1
            assert job.tries == group.tries
        self.jobs[worker] += answer.jobs

    def pick(self, worker: str, which: int) -> tuple[Job, Group, bool]:
        """A job this worker once claimed, and whether it still is its own; more often one that is."""
        owned = [job for job in self.jobs[worker] if self.owns(job)]
        choice = owned if owned and which % 4 else self.jobs[worker]
        job = choice[which // 4 % len(choice)]
        return job, self.groups[job.gid], self.owns(job)

    def owns(self, job: Job) -> bool:
        group = self.groups[job.gid]
        return (group.place, group.token) == ("running", job.token)

    def heartbeat(self, worker: str) -> None:
        lost = [job.gid for job in self.jobs[worker] if not self.owns(job)]
        beat = self.scene.beat(self.jobs[worker], worker)
        assert [job.gid for job in beat.lost] == lost

    def submit(self, worker: str, which: int, outcome: str) -> None:
        if not self.jobs[worker]:
            return
        job, group, owned = self.pick(worker, which)
        made = self.engines[worker]
        if not owned:
            self.submit_again(worker, job, group, outcome, made)
            return
        status = Status.ABORTED if outcome == "aborted" else Status.COMPLETED
        self.scene.submit(job, made, status=status, filtered=outcome == "filtered", worker=worker)
        group.made_by, group.place, group.result = [*group.made_by, made], outcome, job.token
        group.tries -= 1
        self.arrive(group)

    def submit_again(self, worker: str, job: Job, group: Group, outcome: str, made: PolicyVersion) -> None:
        """A zombie, or a reply that was lost: nothing may change."""
        before = self.totals()
        if not self.readable(group):
            return
        result = extend(self.scene.run.buffer.get(self.newest(group)), Status.COMPLETED, made)
        accepted = group.result == job.token
        try:
            self.scene.run.buffer.submit(worker, job, result, 4, filtered=outcome == "filtered")
        except Fenced:
            assert not accepted
        else:
            assert accepted
        assert self.totals() == before

    def release(self, worker: str, which: int, kind: Any) -> None:
        if not self.jobs[worker]:
            return
        job, group, owned = self.pick(worker, which)
        if not owned:
            before = self.totals()
            with contextlib.suppress(Fenced):  # a reply that was lost is said again
                self.scene.run.jobs.release(worker, job, kind)
            assert self.totals() == before
            return
        self.scene.run.jobs.release(worker, job, kind)
        if kind == "failed":
            self.wait_or_die(group)
            return
        group.tries -= 1
        group.token = ""
        if kind == "aborted":
            group.place = "aborted"
            self.arrive(group)
        else:
            group.place, group.lane = "waiting", "resume"

    def leases_run_out(self, worker: str) -> None:
        held = [g for g in self.at("running") if g.owner == worker]
        if held:
            self.scene.expire_leases(*[g.gid for g in held])
        assert self.scene.run.jobs.reap() == len(held)
        for group in held:
            self.wait_or_die(group)

    def fence(self, worker: str) -> None:
        held = [g for g in self.at("running") if g.owner == worker]
        assert self.scene.run.fleet.fence(worker) == len(held)
        self.scene.nonces.pop(worker, None)
        for group in held:
            self.wait_or_die(group)

    def produce(self, worker: str, task: str, number: int) -> None:
        """What most runs do most of the time: prompts in, results out."""
        self.enqueue(task, [1] * number, ahead=20)
        self.load_weights(worker)
        self.claim(worker, number)
        for _ in [job for job in self.jobs[worker] if self.owns(job)]:
            self.submit(worker, 1, "completed")

    # -- trainer ------------------------------------------------------------------------

    def train(self, math: int, code: int) -> None:
        """One good step."""
        self.take(math, code, strict=False)
        self.publish()
        self.commit(0, 2)

    def take(self, math: int, code: int, strict: bool) -> None:
        counts = {task: number for task, number in (("math", math), ("code", code)) if number}
        chosen = {task: self.fresh(task)[:number] for task, number in counts.items()}
        groups = [group for part in chosen.values() for group in part]
        short = any(len(chosen[task]) < number for task, number in counts.items())
        step = self.taken + 1
        answer = self.scene.run.ledger.take(self.scene.trainer, step, counts, strict=strict)
        if not groups or (strict and short):
            assert isinstance(answer, NotReady)
            return
        assert isinstance(answer, Manifest)
        assert answer.gids == [group.gid for group in groups]
        for group, entry in zip(groups, answer.entries, strict=True):
            if entry.version is not None:
                assert staleness(step, entry.version) < THRESHOLD
            assert entry.payload.token == group.result
            assert len(self.scene.run.buffer.get(entry.payload).states[0].response_ids) == 2 * len(group.made_by)
            group.place = "taken"
            self.tasks[group.task].consumed += 1
        self.taken, self.batches[step] = step, answer

    def take_again(self, which: int) -> None:
        if not self.batches:
            return
        step = sorted(self.batches)[which % len(self.batches)]
        assert self.scene.take(step, math=9) == self.batches[step]

    def take_a_wrong_step(self, step: int) -> None:
        if step in self.batches or step == self.taken + 1:
            return
        with pytest.raises(LedgerError):
            self.scene.run.ledger.take(self.scene.trainer, step, {"math": 1})

    def commit(self, behind: int, keep: int) -> None:
        step = max(self.committed, self.taken - behind)
        keep = max(0, step - keep)
        self.scene.run.ledger.commit(self.scene.trainer, step, keep)
        self.committed, self.keep = step, max(self.keep, keep)
        for freed in [s for s in self.batches if s <= keep]:
            for gid in self.batches.pop(freed).gids:
                self.groups[gid].place = "archived"
        assert self.scene.run.ledger.steps() == (self.taken, self.committed, self.keep)

    def publish(self) -> None:
        weights = PolicyVersion(self.forks[-1][0], self.taken)
        self.scene.run.control.publish_weights(self.scene.trainer, weights, "/w", "")
        self.weights = weights

    def load_weights(self, worker: str) -> None:
        self.engines[worker] = self.weights

    def quarantine(self, which: int) -> None:
        """A group of a taken batch is no good: where it may not be taken out, it stays."""
        if not self.batches:
            return
        step = sorted(self.batches)[which % len(self.batches)]
        manifest = self.batches[step]
        if not manifest.entries:
            return
        entry = manifest.entries[which // 8 % len(manifest.entries)]
        ledger, nonce = self.scene.run.ledger, self.scene.trainer
        if step <= self.committed:
            with pytest.raises(LedgerError):
                ledger.quarantine(nonce, step, entry, "bad")
            return
        bad = self.groups[entry.gid]
        ready = self.ready(bad.task, step)
        gids = [gid for gid in manifest.gids if gid != bad.gid]
        if ready:
            gids.insert(manifest.gids.index(bad.gid), ready[0].gid)
            ready[0].place = "taken"
        bad.place, bad.token = "dead", ""
        self.batches[step] = ledger.quarantine(nonce, step, entry, "bad")
        assert self.batches[step].gids == gids
        before = self.totals()
        assert ledger.quarantine(nonce, step, entry, "bad") == self.batches[step]
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

    def zombie_trainer(self, which: int) -> None:
        if not self.old_trainers:
            return
        nonce = self.old_trainers[which % len(self.old_trainers)]
        before = self.totals()
        for call in (
            lambda: self.scene.run.ledger.take(nonce, self.taken + 1, {"math": 1}, strict=False),
            lambda: self.scene.run.ledger.commit(nonce, self.taken, self.taken),
            lambda: self.scene.run.control.publish_weights(nonce, PolicyVersion("zombie", 0), "/w", ""),
        ):
            with pytest.raises(Fenced):
                call()
        assert self.totals() == before

    # -- by hand ------------------------------------------------------------------------------

    def requeue(self, which: int) -> None:
        group = self.some_group(which)
        if group is None:
            return
        before = group.place
        if before not in ("waiting", "dead", "completed", "aborted", "expired"):
            with pytest.raises(GroupHeld):
                self.scene.run.jobs.requeue(group.gid)
            return
        assert self.scene.run.jobs.requeue(group.gid) == before
        if before == "waiting":
            return
        group.place, group.lane, group.token, group.tries = "waiting", "resume", "", 0
        if before != "aborted":
            group.made_by, group.result = [], "init"

    def drop(self, which: int, by_name: bool) -> None:
        group = self.some_group(which)
        if group is None:
            return
        before = group.place
        revoke = group.owner if by_name else ""
        if before in ("taken", "archived", "filtered") or (before == "running" and not by_name):
            with pytest.raises(GroupHeld):
                self.scene.run.jobs.drop(group.gid, revoke=revoke)
            return
        assert self.scene.run.jobs.drop(group.gid, revoke=revoke) == before
        group.place, group.token, group.result = "dropped", "", ""

    def some_group(self, which: int) -> Group | None:
        groups = list(self.groups.values())
        return groups[which % len(groups)] if groups else None

    # -- anybody ----------------------------------------------------------------------------

    def refresh(self, task: str, limit: int) -> None:
        cut = self.taken + 1 - THRESHOLD
        old = [g for place in ("completed", "aborted") for g in self.at(place, task) if self.version(g) < cut]
        assert self.scene.run.buffer.refresh(task, limit=limit) == len(old)
        for group in old:
            group.place = "expired" if self.retried else "dropped"
            group.made_by, group.result = [], "init"

    def collect_garbage(self) -> None:
        while self.scene.run.payloads.collect(3):
            pass

    def server_forgets_its_scripts(self) -> None:
        self.scene.raw.script_flush()

    # -- what must always hold ------------------------------------------------------------------

    def totals(self) -> dict[str, dict[str, int]]:
        audit = self.scene.run.account.totals()
        assert audit.clean, audit.faults
        return {task.task: task.places for task in audit.tasks}

    def newest(self, group: Group) -> Any:
        return self.scene.payload(group.gid)

    def readable(self, group: Group) -> bool:
        return group.place not in ("archived", "filtered", "dropped")

    def check_totals(self) -> None:
        for task, places in self.totals().items():
            assert {p: places[p] for p in PLACES} == {p: len(self.at(p, task)) for p in PLACES}

    def check_everything(self) -> None:
        self.scene.check()
        places = {"completed": "pool", "aborted": "pool", "expired": "pool"}
        for group in self.groups.values():
            task, draw = group.task, int(group.gid[-10:])
            assert self.scene.run.account.places(task, draw) == [places.get(group.place, group.place)]
            if self.readable(group):
                tokens = self.scene.run.buffer.get(self.newest(group)).states[0].response_ids
                assert len(tokens) == 2 * len(group.made_by), group
        for task in TASKS:
            pool = self.scene.raw.zrange(self.scene.keys.pool(task, "completed"), 0, -1)
            index = self.scene.raw.zrange(self.scene.keys.order(task), 0, -1)
            assert index == (sorted(pool) if self.order == "fifo" else [])
        for step, manifest in self.batches.items():
            assert self.scene.run.ledger.manifest(step) == manifest
