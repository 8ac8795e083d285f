"""The workers of a run: registered, renewed by their heartbeats, fenced, and listed."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

from buffer.control.control import STATE_FIELDS, ControlState
from buffer.control.length_counts import Counts, read_counts
from buffer.control.worker_record import HeartbeatReport, WorkerRecord, WorkerState, read_record
from buffer.errors import Fenced, RunNotFound, ScriptError
from buffer.ids import valid_name
from buffer.job import Job, digest_of
from buffer.redis.bounds import GROUPS_PER_CALL
from buffer.redis.bulk_io import Command
from buffer.redis.retry import SYSTEM_RANDOM
from buffer.redis.scripts import ScriptCall
from buffer.redis.store import RunContext
from buffer.wire.rollout import PolicyVersion

MOST_COUNTED = 64  # workers whose lengths stand for all: each has counted thousands

SEARCHED_EVENTS = 500  # newest events in which ended workers are found: at its end, a run's last

_ENDS = {"worker_left": WorkerState.LEFT, "worker_lost": WorkerState.LOST}

NO_TOKENS: Mapping[Job, PolicyVersion] = {}  # for groups without tokens

LimitsStamp = tuple[int, str]
"""Number and nonce of the limits' last change: a server that lost data repeats only numbers."""

STAMP_FIELDS = ("limits_version", "limits_op")
"""Fields of `meta` with the stamp."""


def parse_stamp(version: bytes | str | None, operation: bytes | str | None) -> LimitsStamp:
    text = operation.decode() if isinstance(operation, bytes) else operation or ""
    return int(version or 0), text


@dataclass(frozen=True, slots=True)
class HeartbeatReply:
    """The reply to a heartbeat: the control state, and the jobs to stop.

    `lost` are jobs whose leases are lost, `expiring` those that can serve no train step any more.
    If the server has forgotten the worker, `known` is False, `control` None, and all jobs are lost.
    `limits`: the stamp for `Run.adopt_limits`. `is_agreed`: worker and server agreed on what is
    held.
    """

    known: bool
    control: ControlState | None
    lost: tuple[Job, ...]
    limits: LimitsStamp
    expiring: tuple[Job, ...] = ()
    is_agreed: bool = True


def _unless_replaced(reply: Sequence[str], worker: str) -> Sequence[str]:
    if list(reply) == ["REPLACED"]:
        raise Fenced(
            f"another process has registered as worker {worker!r}; this one must leave",
            hint="give every worker an --id of its own",
        )
    return reply


@dataclass(frozen=True, slots=True)
class Refusals:
    """The reasons of live workers for not loading some weights, by worker; `live`: all of them."""

    weights: PolicyVersion
    live: int
    reasons: Mapping[str, str]

    @property
    def are_all(self) -> bool:
        return len(self.reasons) == self.live

    def __str__(self) -> str:
        worker, reason = next(iter(self.reasons.items()))
        return (
            f"{len(self.reasons)} of {self.live} workers cannot load the weights {self.weights} "
            f"({worker}: {reason})"
        )


class Fleet:
    def __init__(self, context: RunContext) -> None:
        self._store, self._keys, self._limits, _ = context

    def register(
        self, worker: str, nonce: str, facts: Mapping[str, str], sampled: int = 0
    ) -> tuple[str, ControlState]:
        """Join or rejoin the run; return its nonce and the control state. Raises RunNotFound.

        `sampled`: tokens that the engine of this process has sampled so far.
        """
        keys = self._keys
        worker = valid_name("worker", worker)
        reply = self._store.call(
            "register",
            keys.slots(worker=worker),
            {"worker": worker, "nonce": nonce, "sampled": sampled},
            tail_args=[part for pair in facts.items() for part in pair],
        )
        match reply:
            case ["OK", run_nonce, *state]:
                return run_nonce, ControlState.parse(state)
            case _:
                raise RunNotFound(
                    f"there is no run {keys.run!r} on this server",
                    hint="`rolloutmq create CONFIG` or Run.create makes it",
                )

    def heartbeat(
        self,
        worker: str,
        nonce: str,
        pulse: HeartbeatReport,
        held: Sequence[Job],
        oldest: Mapping[Job, PolicyVersion] = NO_TOKENS,
        reported: Container[Job] = (),
    ) -> HeartbeatReply:
        """Renew the lease on `held`, and exchange the receipt for the newest control state.

        One round trip, which also reads the stamp of the run's limits; a second one settles what is
        held if worker and server differ. `oldest`: the weights of the oldest token of each group
        that has tokens; `reported`: the groups whose weights an earlier heartbeat reported. Raises
        Fenced if another process has registered with the same id.
        """
        ages = self._ages(oldest, reported)
        beat = ScriptCall(
            "heartbeat",
            self._keys.slots(worker=worker),
            {
                "worker": worker,
                "nonce": nonce,
                "lease_ms": self._limits.lease_ms,
                **pulse.arguments(),
                "held": len(held),
                "digest": digest_of(held),
            },
            tail_args=[part for age in ages for part in age],
        )
        read = ("HMGET", self._keys.meta, *STAMP_FIELDS)
        reply, stamp = self._store.send("heartbeat", [beat, read])
        limits = parse_stamp(*stamp)
        match _unless_replaced(reply, worker):
            case ["UNKNOWN"]:
                return HeartbeatReply(False, None, tuple(held), limits)
            case [code, *fields]:
                old = {ages[int(n) - 1][2:] for n in fields[len(STATE_FIELDS) :]}
                expiring = tuple(job for job in oldest if self._age(job, oldest[job]) in old)
                lost = self._reconcile(worker, nonce, held) if code == "DIFFERS" else ()
                if lost is None:
                    return HeartbeatReply(False, None, tuple(held), limits)
                return HeartbeatReply(
                    True, ControlState.parse(fields), lost, limits, expiring, is_agreed=code == "OK"
                )
            case _:
                raise ScriptError(f"heartbeat: an empty reply for worker {worker!r}")

    def _ages(
        self, oldest: Mapping[Job, PolicyVersion], reported: Container[Job]
    ) -> list[tuple[str, str, str, int, int]]:
        """Return the units (gid, token, lineage, version, threshold) of a heartbeat.

        One for each group that is not in `reported`, and one for all others of the same weights.
        """
        found: dict[tuple[str, str, str, int, int], None] = {}
        for job, weights in oldest.items():
            age = self._age(job, weights)
            if age is not None:
                own = ("", "") if job in reported else (job.gid, job.token)
                found[(*own, *age)] = None
        return list(found)[:1024]  # one heartbeat reports no more

    def _age(self, job: Job, weights: PolicyVersion) -> tuple[str, int, int] | None:
        """Return (lineage, version, threshold); None for a group that does not age."""
        threshold = self._limits.threshold(job.task)
        if threshold is None:
            return None
        return (weights.lineage, weights.version, threshold)

    def _reconcile(self, worker: str, nonce: str, held: Sequence[Job]) -> tuple[Job, ...] | None:
        """Return which of `held` the server took back; None if it has forgotten the worker.

        It takes back what it holds for the worker and is not in `held`, except for new claims.
        """
        reply = self._store.call(
            "reconcile",
            self._keys.slots(worker=worker),
            {
                "worker": worker,
                "nonce": nonce,
                "lease_ms": self._limits.lease_ms,
                "max_tries": self._limits.max_tries,
                "limit": GROUPS_PER_CALL,
            },
            tail_args=[part for job in held for part in (job.gid, job.token)],
        )
        match _unless_replaced(reply, worker):
            case ["OK", *numbers]:
                return tuple(held[int(n) - 1] for n in numbers)
            case _:
                return None

    def deregister(self, worker: str, nonce: str, sampled: str = "") -> bool:
        """Leave the run; return False if the worker still holds leases, which must run out.

        `sampled`: as in `HeartbeatReport`.
        """
        arguments = {"worker": worker, "nonce": nonce, "sampled": sampled}
        code, *_ = self._store.call("deregister", self._keys.slots(worker=worker), arguments)
        return bool(code != "HOLDS")

    def fence(self, worker: str) -> int:
        """Forget a worker and revoke all that it holds, in slices; return the number of groups."""
        limits = self._limits
        args: dict[str, str | int] = {
            "worker": worker,
            "lease_ms": limits.lease_ms,
            "limit": GROUPS_PER_CALL,
            "max_tries": limits.max_tries,
            "worker_timeout_ms": limits.worker_timeout_ms,
        }
        revoked, is_gone = 0, False
        while not is_gone:
            _, waiting, buried, forgotten = self._store.call("reap", self._keys.slots(), args)
            revoked += int(waiting) + int(buried)
            is_gone = int(forgotten) > 0
        return revoked

    def unbar(self, worker: str) -> int:
        """Let a barred worker claim again; return its number of bad groups, 0 if not barred."""
        _, bad_groups = self._store.call(
            "unbar_worker", self._keys.slots(), {"worker": valid_name("worker", worker)}
        )
        return int(bad_groups)

    def refusals(self, weights: PolicyVersion) -> Refusals:
        """Return which live workers could not load `weights`, and why."""
        key = self._keys.workers
        _, (seconds, micros) = self._store.send("refusals", [("EXISTS", key), ("TIME",)])
        alive_since_ms = seconds * 1000 + micros // 1000 - self._limits.lease_ms
        found = self._store.ask("refusals", "ZRANGEBYSCORE", key, alive_since_ms, "+inf")
        live = [worker.decode() for worker in found]
        reads = [("HGET", self._keys.worker(worker), "refusal") for worker in live]
        label = f"{weights} "
        reasons = {
            worker: text.decode(errors="replace").removeprefix(label)
            for worker, text in zip(live, self._store.send("refusals", reads), strict=True)
            if text and text.startswith(label.encode())
        }
        return Refusals(weights, len(live), reasons)

    def response_lengths(self) -> dict[str, dict[str, Counts]]:
        """Return the response lengths that all workers counted, by task and fate.

        Of many workers, it is an estimate.
        """
        known = self._store.ask("response lengths", "ZRANGE", self._keys.workers, 0, -1)
        chosen = SYSTEM_RANDOM.sample(known, min(len(known), MOST_COUNTED))
        reads = [("HGET", self._keys.worker(worker.decode()), "lengths") for worker in chosen]
        found = self._store.send("response lengths", reads)
        texts = [(text or b"").decode(errors="replace") for text in found]
        return read_counts(texts, len(known) / max(1, len(chosen)))

    def ended(self) -> list[WorkerRecord]:
        """Return the last records of workers that left or were lost, among the newest events."""
        newest = ("XREVRANGE", self._keys.events, "+", "-", "COUNT", SEARCHED_EVENTS)
        events, (seconds, micros) = self._store.send("ended workers", [newest, ("TIME",)])
        now_ms = seconds * 1000 + micros // 1000
        found: dict[str, WorkerRecord] = {}
        for _, fields in events:
            name, worker = (fields.pop(key, b"").decode() for key in (b"event", b"worker"))
            if name in _ENDS and worker not in found:
                written = fields | {b"state": _ENDS[name].value.encode()}
                found[worker] = read_record(worker, written, 0, None, now_ms)
        return [*found.values()]

    def workers(self) -> list[WorkerRecord]:
        """Return the records of all known workers, by their last heartbeat, oldest first."""
        keys = self._keys
        ids = [w.decode() for w in self._store.ask("workers", "ZRANGE", keys.workers, 0, -1)]
        if not ids:
            return []
        reads: list[Command] = [("HMGET", keys.bad_submissions, *ids), ("TIME",)]
        for worker in ids:
            reads += [("HGETALL", keys.worker(worker)), ("HLEN", keys.leased(worker))]
        suspicions, (seconds, micros), *replies = self._store.send("workers", reads)
        now_ms = seconds * 1000 + micros // 1000
        rows = zip(ids, replies[::2], replies[1::2], suspicions, strict=True)
        return [
            # one field is the digest
            read_record(worker, written, max(0, fields - 1), suspicion, now_ms)
            for worker, written, fields, suspicion in rows
        ]
