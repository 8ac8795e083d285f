"""A run with a producer, workers and a trainer whose every move a test makes by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import redis

from buffer.control.control import Mode
from buffer.control.control_line import receipt
from buffer.control.fleet import HeartbeatReply
from buffer.control.worker_record import HeartbeatReport, WorkerState
from buffer.groups.claim import Enqueued
from buffer.groups.kept_turns import KeptTurns
from buffer.groups.skips import skip_letter
from buffer.ids import LANES, group_id, new_nonce
from buffer.job import Job, PayloadRef, SampledTokens
from buffer.limits import RunLimits, TaskLimits
from buffer.manifest import Manifest, NotReady
from buffer.redis.store import Store
from buffer.run.run import Run
from buffer.wire import group_bytes
from buffer.wire.group import RolloutGroup
from buffer.wire.rollout import PolicyVersion, RolloutState, Status, VersionSpan
from tests.buffer.keyspace import dump

FIRST = PolicyVersion("l0", 0)
TASKS = {"math": TaskLimits(), "code": TaskLimits(), "quiz": TaskLimits(eval_of="math")}
LIMITS = RunLimits(stale_threshold=2, on_straggler="drop", tasks=TASKS)


def prompt(gid: str, samples: int = 2) -> bytes:
    """An INIT payload."""
    message = {"role": "user", "content": f"what is {gid}?"}
    states = [
        RolloutState(index=i, messages=[message], prompt_ids=np.arange(3)) for i in range(samples)
    ]
    return group_bytes.encode(RolloutGroup(gid, gid.rpartition("-")[0], states))


def rollout(
    status: Status, made: PolicyVersion | None, index: int = 0, **fields: Any
) -> RolloutState:
    """Two tokens made by weights, or by nobody knows which."""
    return RolloutState(
        index=index,
        prompt_ids=[1, 2, 3],
        response_ids=[5, 6],
        logprobs=[-0.5, -0.25],
        spans=[VersionSpan(0, 2, made.version, made.lineage)] if made else [],
        status=status,
        reward={"score": 1.0},
        **fields,
    )


def turn(number: int, weights: PolicyVersion = FIRST) -> RolloutState:
    """One more token of an agent's session: its number."""
    span = VersionSpan(0, 1, weights.version, weights.lineage)
    return RolloutState(
        index=0, prompt_ids=[4], response_ids=[number], logprobs=[-0.5], spans=[span]
    )


def extend(group: RolloutGroup, status: Status, weights: PolicyVersion | None) -> RolloutGroup:
    """The group with two more tokens in each rollout, made by `weights` (None: no tokens)."""
    for state in group.states:
        if weights is not None:
            span = VersionSpan(0, 2, weights.version, weights.lineage)
            state.append(np.array([5, 6], "<i4"), np.array([-0.5, -0.25], "<f4"), [span])
        state.status = status
        state.reward = {"score": 1.0} if status is Status.COMPLETED else None
        state.finish_reason = "stop" if status is Status.COMPLETED else "abort"
    return group.continued(group.states)


class Scene:
    """One run. `raw` sees it with plain commands; `producer` and `trainer` are the nonces of its
    roles.
    """

    def __init__(
        self, store: Store, raw: redis.Redis, name: str, limits: RunLimits = LIMITS
    ) -> None:
        self.store = store
        self.name = name
        self.raw: Any = raw
        self.run = Run.create(store, name, new_nonce(), limits, FIRST, "/weights/0")
        self.keys = self.run.keys
        self.producer = ""
        self.trainer = ""
        self.nonces: dict[str, str] = {}

    # -- moves ---------------------------------------------------------------

    def open_producer(self, **options: Any) -> str:
        nonce = new_nonce()
        self.run.control.open_producer(nonce, **options)
        self.producer = nonce
        return nonce

    def open_trainer(self, step: int = 0, lineage: str = "l1", **options: Any) -> str:
        nonce = new_nonce()
        self.run.trainers.open(nonce, step=step, lineage=lineage, **options)
        self.trainer = nonce
        return nonce

    def enqueue(
        self,
        count: int,
        *,
        task: str = "math",
        target: int | None = 1000,
        samples: Sequence[int] | None = None,
    ) -> Enqueued:
        """The next draws, their prompts first. Of `samples`, -1 is a draw that is skipped."""
        if not self.producer:
            self.open_producer()
        samples = [2] * count if samples is None else samples
        cursor = self.run.jobs.cursor(task)
        numbers = {cursor + i: n for i, n in enumerate(samples)}
        gids = {draw: group_id(task, draw) for draw in numbers}
        self.run.payloads.write_prompts(
            {gids[draw]: prompt(gids[draw], n) for draw, n in numbers.items() if n > 0}
        )
        letters = {d: skip_letter(gids[d], "no page", {"row": d}) for d in gids if numbers[d] < 0}
        counts = [max(0, n) for n in samples]
        nonce = new_nonce()
        return self.run.jobs.enqueue(self.producer, nonce, task, cursor, counts, target, letters)

    def worker(self, name: str = "w0") -> str:
        if name not in self.nonces:
            self.nonces[name] = new_nonce()
            self.run.fleet.register(name, self.nonces[name], {"engine": "none"})
        return self.nonces[name]

    def claim(
        self,
        count: int = 1,
        worker: str = "w0",
        weights: PolicyVersion = FIRST,
        token: str | None = None,
    ) -> list[Job]:
        token = token or new_nonce()
        claim = self.run.jobs.claim(worker, self.worker(worker), token, weights, count)
        assert claim.refusal is None
        return claim.jobs

    def bury(self, job: Job, reason: str = "KeyError: 'x'", *, keep: bool = True) -> Job:
        """Fail the only group in all its tries, and `keep` its responses; return its last job."""
        while self.run.jobs.release("w0", job, "failed", reason) != "dead":
            self.run.jobs.resume_task(job.task)
            (job,) = self.claim()
        if keep:
            assert self.run.dead_letters.keep_responses(job, self.failed(job))
        return job

    def failed(self, job: Job) -> RolloutGroup:
        return extend(self.run.buffer.read(job.prompt), Status.FAILED, FIRST)

    def turns(self, job: Job, group: RolloutGroup | None = None) -> KeptTurns:
        return self.run.buffer.keep_turns(job, group or self.run.buffer.read(job.payload))

    def beat(
        self,
        held: Sequence[Job],
        worker: str = "w0",
        ack: int = 1,
        oldest: PolicyVersion | None = None,
        sampled: str = "",
    ) -> HeartbeatReply:
        """`oldest`: the weights of the oldest token of each group that is held."""
        pulse = HeartbeatReport(ack, FIRST, WorkerState.IDLE, sampled=sampled, tokens_per_s=1.0)
        ages = dict.fromkeys(held, oldest) if oldest else {}
        return self.run.fleet.heartbeat(worker, self.worker(worker), pulse, held, ages)

    def receipt(self, ack: int, worker: str = "w0") -> str:
        """What a control line sends for an epoch that was carried out; the code of the answer."""
        return str(
            self.run.store.call("receipt", *receipt(self.keys, worker, self.worker(worker), ack))[0]
        )

    def submit(
        self,
        job: Job,
        weights: PolicyVersion | None = FIRST,
        *,
        status: Status = Status.COMPLETED,
        filtered: bool = False,
        worker: str = "w0",
        begun: RolloutGroup | None = None,
        sampled: SampledTokens | None = None,
    ) -> None:
        """`begun`: the group as its worker has it; None: as it was claimed."""
        group = extend(begun or self.run.buffer.read(job.payload), status, weights)
        self.run.buffer.submit(worker, job, group, 4, filtered=filtered, sampled=sampled)

    def ready(self, *versions: int, task: str = "math", lineage: str = "l0") -> list[str]:
        """New groups in the completed pool, one of each policy version; their gids."""
        self.enqueue(len(versions), task=task)
        jobs = self.claim(len(versions))
        for job, version in zip(jobs, versions, strict=True):
            self.submit(job, PolicyVersion(lineage, version))
        return [job.gid for job in jobs]

    def take(self, step: int, strict: bool = True, **counts: int) -> Manifest:
        manifest = self.run.ledger.take(self.trainer, step, counts or {"math": 1}, strict=strict)
        assert isinstance(manifest, Manifest), manifest
        return manifest

    def try_take(self, step: int, strict: bool = True, **counts: int) -> NotReady:
        answer = self.run.ledger.take(self.trainer, step, counts or {"math": 1}, strict=strict)
        assert isinstance(answer, NotReady), answer
        return answer

    def expire_leases(self, *workers: str) -> None:
        """Let leases run out (all of them by default) without waiting, and without an outage being
        suspected. Their registrations will be gone.
        """
        now = self.now_ms()
        for worker in workers or [w.decode() for w in self.raw.zrange(self.keys.leases, 0, -1)]:
            self.raw.zadd(self.keys.leases, {worker: now - 1}, xx=True)
            self.nonces.pop(worker, None)
        self.raw.hset(self.keys.clock, mapping={"seen_ms": now, "grace_until_ms": 0})

    def take_back(self, *gids: str, worker: str = "w0") -> None:
        """Let a worker lose some of its groups: it has not known them for longer than a lease."""
        for gid in gids:
            self.raw.hset(self.keys.group(gid), "claimed_ms", 1)
        held = self.raw.hgetall(self.keys.leased(worker)).items()
        left = [
            Job(gid.decode(), token.decode(), "", 1, PayloadRef(gid.decode(), "init", 1, 0, ""))
            for gid, token in held
            if gid != b"digest" and gid.decode() not in gids
        ]
        self.beat(left, worker)

    def held(self, worker: str = "w0") -> list[str]:
        """The gids that a worker holds, in the order in which it claimed them."""
        return [
            gid.decode() for gid in self.raw.hkeys(self.keys.leased(worker)) if gid != b"digest"
        ]

    def rest(self) -> list[str]:
        """Let all workers hand back what they hold, as a drain does; return the gids."""
        held = []
        for key in [*self.raw.scan_iter(self.keys.leased("*"))]:
            worker = key.decode().rpartition(":")[2]
            for gid, token in self.raw.hgetall(key).items():
                if gid != b"digest":
                    ref = PayloadRef(gid.decode(), "init", 1, 0, "")
                    job = Job(gid.decode(), token.decode(), "", 1, ref)
                    self.run.jobs.release(worker, job, "handback")
                    held.append(job.gid)
        return held

    def pause(self, mode: Mode = Mode.ABORT, lanes: str = "") -> int:
        return self.run.control.set_mode("operator", mode, lanes=lanes).epoch

    # -- sights --------------------------------------------------------------

    def now_ms(self) -> int:
        seconds, micros = self.raw.time()
        return int(seconds) * 1000 + int(micros) // 1000

    def record(self, gid: str) -> dict[str, str]:
        return {k.decode(): v.decode() for k, v in self.raw.hgetall(self.keys.group(gid)).items()}

    def payload(self, gid: str) -> PayloadRef:
        """Where the newest bytes of a group are."""
        record = self.record(gid)
        return PayloadRef(
            gid,
            record["payload"],
            int(record["chunks"]),
            int(record["size"]),
            record.get("crc", ""),
        )

    def counters(self, task: str = "math") -> dict[str, str]:
        return self.run.progress(task)

    def stream(self, lane: str, task: str = "math") -> list[str]:
        return [
            fields[b"gid"].decode() for _, fields in self.raw.xrange(self.keys.jobs(task, lane))
        ]

    def pool(self, status: str, task: str = "math") -> list[tuple[str, float]]:
        """(gid, score) of a pool, in order."""
        members = self.raw.zrange(self.keys.pool(task, status), 0, -1, withscores=True)
        return [(member.decode().partition(":")[2], score) for member, score in members]

    def ages(self, task: str = "math") -> dict[str, float]:
        """The age index: the oldest version of each group that waits or runs, and has tokens."""
        members = self.raw.zrange(self.keys.age(task), 0, -1, withscores=True)
        return {member.decode(): score for member, score in members}

    def garbage(self) -> set[str]:
        return {member.decode() for member in self.raw.smembers(self.keys.garbage)}

    def bit(self, stage: str, draw: int, task: str = "math") -> int:
        return int(self.raw.getbit(self.keys.ended(task, stage), draw))

    def dump(self) -> dict[str, Any]:
        return dump(self.raw, self.name)

    def check(self) -> None:
        """The account of the run adds up, group by group (I1)."""
        audit = self.run.account.fsck()
        assert audit.clean, (audit.faults, audit.lost, audit.doubled)
        self.check_ages()

    def check_ages(self) -> None:
        """An age index names groups that wait or run, and all of those that wait with tokens."""
        for task in self.run.limits.tasks:
            ages = self.ages(task)
            assert {self.record(gid).get("stage") for gid in ages} <= {"waiting", "running"}
            waiting = {
                gid: self.record(gid) for lane in LANES[1:] for gid in self.stream(lane, task)
            }
            begun = {
                gid: float(record["version"])
                for gid, record in waiting.items()
                if record["payload"] != "init" and record["version"]
            }
            assert begun == {gid: age for gid, age in ages.items() if gid in waiting}
