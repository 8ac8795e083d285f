"""The workers of a run: what each reports with its heartbeats, and the record that is kept.

A number of a heartbeat is a field of `HeartbeatNumbers`, an argument of `lua/heartbeat.lua`, and a
value that the worker fills in (`producer_workers/worker/heartbeat.py`); the views read it from
`WorkerRecord`. A worker of another language may write anything into its record: what is not a
valid number counts as not written, and texts are kept as they are.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any

from buffer.control.control import STATE_FIELDS, ControlState, shorten_reason
from buffer.control.control_line import ControlConnection
from buffer.control.histogram import JUDGE_BOUNDS_S, Histogram, join_counts, parse_counts
from buffer.errors import Fenced, RunNotFound, ScriptError
from buffer.model.ids import valid_name
from buffer.model.job import Job
from buffer.model.limits import RunLimits
from buffer.rollouts.rollout import PolicyVersion
from buffer.store.keys import Keys
from buffer.store.store import Store

FENCE_SLICE = 200
"""Groups that one call of the server revokes at most."""


NO_TOKENS: Mapping[Job, PolicyVersion] = {}
"""The oldest weights of groups of which none has a token."""


class WorkerState(StrEnum):
    """States that workers of this project report; one in another language may report any word."""

    STARTING = "starting"
    """registered, and no heartbeat yet"""
    IDLE = "idle"
    """holds no group and may claim"""
    WORKING = "working"
    PAUSED = "paused"
    DRAINING = "draining"
    """finishes what it holds, then leaves"""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeartbeatNumbers:
    """The numbers of a heartbeat. Counts without another remark are since the worker started."""

    tokens_per_s: float = 0.0
    concurrency: int = 0
    """groups sampled at once at most; 0 = not reported"""
    requests: int | None = None
    """running and waiting in the engine; None where the engine does not report them"""
    done: int = 0
    """completed groups"""
    failed: int = 0
    """failed groups"""
    judging: int = 0
    """groups held now that only wait for their judge: all of their samples are generated"""
    judged: int = 0
    """answers of judges, failures too"""
    judging_ms: int = 0
    """the time that all of these answers took together"""
    judge_failures: int = 0
    judge_buckets: tuple[int, ...] = ()
    """how many of these answers took how long: see `WorkerRecord.judge_times`"""


@dataclass(frozen=True, slots=True)
class HeartbeatReport(HeartbeatNumbers):
    """What a worker reports with a heartbeat.

    `ack` is the control epoch that it has carried out. `known_epoch` is the newest one that it knew
    when the numbers were read; it is not sent.
    """

    ack: int
    weights: PolicyVersion
    state: WorkerState
    refusal: str = ""
    """the newest weights that the engine could not load, and why; "" if it could"""
    known_epoch: int = 0

    def arguments(self) -> dict[str, str | int]:
        """Return the arguments of the script `heartbeat` that a worker reports, by name."""
        numbers = {each.name: getattr(self, each.name) for each in fields(HeartbeatNumbers)}
        numbers["tokens_per_s"] = f"{self.tokens_per_s:.1f}"
        numbers["requests"] = "" if self.requests is None else self.requests
        numbers["judge_buckets"] = join_counts(self.judge_buckets)
        texts = {"state": self.state.value, "refusal": shorten_reason(self.refusal)}
        return {"ack": self.ack, "weights": str(self.weights), **texts, **numbers}


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRecord(HeartbeatNumbers):
    """One worker as the server knows it.

    Numbers that were not written are 0 (None for `requests`), and texts are empty. `silent_ms` is
    the time since its last heartbeat, `holds` the number of its leases. `bad_groups` and
    `barred_for_ms` are None unless the worker is barred for what it submitted.
    """

    id: str
    silent_ms: int
    holds: int
    bad_groups: int | None = None
    barred_for_ms: int | None = None
    state: str = ""
    """a `WorkerState`, or any text of a foreign worker"""
    weights: str = ""
    """"lineage:version", or any text of a foreign worker"""
    refusal: str = ""
    """"lineage:version reason" of published weights that it could not load"""
    engine: str = ""
    ack: int = 0
    quarantined: int = 0
    """groups that a trainer could not use"""
    joined_ms: int = 0
    seen_ms: int = 0
    facts: Mapping[str, str] = field(default_factory=dict)
    """what else the worker registered: host, pid, …"""

    @property
    def judge_times(self) -> Histogram:
        """The times of all answers of its judges; empty if it counts by other bounds."""
        return Histogram(JUDGE_BOUNDS_S, self.judge_buckets, self.judging_ms / 1000)

    @property
    def is_barred(self) -> bool:
        """Whether the worker gets no groups because trainers could not use what it submitted."""
        return self.barred_for_ms is not None

    def is_live(self, lease_ms: int) -> bool:
        """Return whether a pause waits for it: its last heartbeat is younger than a lease."""
        return self.silent_ms < lease_ms


OF_THE_READER = ("id", "silent_ms", "holds", "bad_groups", "barred_for_ms", "facts")
"""Fields that do not come from the worker's hash; these names are ignored there."""

_PRIVATE = ("nonce", "claim", "claimed")


def read_record(
    worker: str, written: Mapping[bytes, bytes], holds: int, suspicion: bytes | None, now_ms: int
) -> WorkerRecord:
    """Return the record of a worker.

    `written` is its hash, `holds` the size of its set of leases, and `suspicion` its entry in
    `suspects` ("since_ms bad barred_ms").
    """
    texts = {
        name.decode(errors="replace"): value.decode(errors="replace")
        for name, value in written.items()
    }
    parsed = {name: parse(texts[name]) for name, parse in _PARSERS.items() if name in texts}
    known: dict[str, Any] = {name: value for name, value in parsed.items() if value is not None}
    reserved = (*_PARSERS, *OF_THE_READER, *_PRIVATE)
    facts = {name: text for name, text in texts.items() if name not in reserved}
    _, bad_groups, barred_ms = (int(part) for part in (suspicion or b"0 0 0").split())
    return WorkerRecord(
        id=worker,
        silent_ms=now_ms - known.get("seen_ms", 0),
        holds=holds,
        bad_groups=bad_groups if barred_ms else None,
        barred_for_ms=now_ms - barred_ms if barred_ms else None,
        facts=facts,
        **known,
    )


def _whole(text: str) -> int | None:
    return int(text) if re.fullmatch(r"-?\d{1,15}", text, re.ASCII) else None


def _rate(text: str) -> float | None:
    is_number = re.fullmatch(r"\d{1,15}(\.\d{1,20})?(e[+-]?\d{1,2})?", text, re.ASCII)
    return float(text) if is_number else None


_PARSER_OF: dict[object, Callable[[str], object]] = {
    "int": _whole,
    "int | None": _whole,
    "float": _rate,
    "tuple[int, ...]": parse_counts,
    "str": str,
}
_PARSERS = {
    each.name: _PARSER_OF[each.type]
    for each in fields(WorkerRecord)
    if each.name not in OF_THE_READER
}


@dataclass(frozen=True, slots=True)
class HeartbeatReply:
    """The reply to a heartbeat: the control state, and the jobs to stop.

    `lost` are jobs whose leases are lost, `doomed` those that can serve no train step any more. If
    the server has forgotten the worker, `known` is False, `control` None, and all jobs are lost.
    """

    known: bool
    control: ControlState | None
    lost: tuple[Job, ...]
    doomed: tuple[Job, ...] = ()


@dataclass(frozen=True, slots=True)
class Refusals:
    """The reasons of live workers for not loading some weights, by worker; `live`: all of them."""

    weights: PolicyVersion
    live: int
    reasons: Mapping[str, str]

    @property
    def are_all(self) -> bool:
        """Return whether every live worker refuses them."""
        return len(self.reasons) == self.live

    def __str__(self) -> str:
        worker, reason = next(iter(self.reasons.items()))
        return (
            f"{len(self.reasons)} of {self.live} workers cannot load the weights {self.weights} "
            f"({worker}: {reason})"
        )


class Fleet:
    """Registers, renews, fences and lists the workers of one run.

    Usage:
        run_nonce, state = run.fleet.register("w0", nonce, {"engine": "vllm"})
        beat = run.fleet.heartbeat("w0", nonce, pulse, held)
        run.fleet.deregister("w0", nonce)
    """

    def __init__(self, store: Store, keys: Keys, limits: RunLimits) -> None:
        self._store = store
        self._keys = keys
        self._limits = limits

    def register(
        self, worker: str, nonce: str, facts: Mapping[str, str]
    ) -> tuple[str, ControlState]:
        """Join the run, or join it again; return the run's nonce and the control state.

        Raises RunNotFound.
        """
        keys = self._keys
        worker = valid_name("worker", worker)
        reply = self._store.call(
            "register",
            keys.slots(worker=worker),
            {"worker": worker, "nonce": nonce},
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
    ) -> HeartbeatReply:
        """Renew the leases of `held`, and exchange the receipt for the newest control state.

        `oldest`: the weights of the oldest token of each group that has tokens. Raises Fenced if
        another process has registered with the same id.
        """
        reply = self._store.call(
            "heartbeat",
            self._keys.slots(worker=worker),
            {
                "worker": worker,
                "nonce": nonce,
                "lease_ms": self._limits.lease_ms,
                **pulse.arguments(),
            },
            tail_args=[part for job in held for part in self._held(job, oldest.get(job))],
        )
        match reply:
            case ["REPLACED"]:
                raise Fenced(
                    f"another process has registered as worker {worker!r}; this one must leave",
                    hint="give every worker an --id of its own",
                )
            case ["UNKNOWN"]:
                return HeartbeatReply(False, None, tuple(held))
            case [_, *fields]:
                numbers = [int(field) for field in fields[len(STATE_FIELDS) :]]
                lost = tuple(held[n - 1] for n in numbers if n > 0)
                doomed = tuple(held[-n - 1] for n in numbers if n < 0)
                return HeartbeatReply(True, ControlState.parse(fields), lost, doomed)
            case _:
                raise ScriptError(f"heartbeat: an empty reply for worker {worker!r}")

    def _held(self, job: Job, oldest: PolicyVersion | None) -> tuple[str | int, ...]:
        weights = (oldest.lineage, oldest.version) if oldest else ("", "")
        return (job.gid, job.token, *weights, self._limits.threshold(job.task))

    def open_control_connection(self, worker: str, nonce: str) -> ControlConnection:
        """Open a connection for a worker's hints and receipts. Raises redis.RedisError."""
        return ControlConnection(self._store, self._keys, worker, nonce)

    def deregister(self, worker: str, nonce: str) -> bool:
        """Leave the run; return False if the worker still holds leases, which must run out."""
        code, *_ = self._store.call(
            "deregister", self._keys.slots(worker=worker), {"worker": worker, "nonce": nonce}
        )
        return bool(code != "HOLDS")

    def fence(self, worker: str) -> int:
        """Revoke all that a worker holds, and forget it; return the number of groups.

        Slice by slice: a script must not stall the server.
        """
        revoked = 0
        left = 1
        while left:
            counts = self._fence_slice(worker)
            revoked += counts[0]
            left = counts[1]
        return revoked

    def _fence_slice(self, worker: str) -> tuple[int, int]:
        """Return how many groups were revoked, and how many are left."""
        _, revoked, left = self._store.call(
            "fence_worker",
            self._keys.slots(worker=worker),
            {"worker": worker, "max_tries": self._limits.max_tries, "limit": FENCE_SLICE},
        )
        return int(revoked), int(left)

    def admit(self, worker: str) -> int:
        """Let a barred worker claim again; return how many bad groups it had submitted.

        0: it was not barred.
        """
        _, bad_groups = self._store.call(
            "admit", self._keys.slots(), {"worker": valid_name("worker", worker)}
        )
        return int(bad_groups)

    def refusals(self, weights: PolicyVersion) -> Refusals:
        """Return which live workers could not load `weights`, and why, in two round trips."""
        live, texts = self._store.retrying("refusals", self._refusals)
        label = f"{weights} "
        reasons = {
            worker.decode(): text.decode(errors="replace").removeprefix(label)
            for worker, text in zip(live, texts, strict=True)
            if text and text.startswith(label.encode())
        }
        return Refusals(weights, len(live), reasons)

    def _refusals(self) -> tuple[list[bytes], list[bytes | None]]:
        client: Any = self._store.control
        seconds, micros = client.time()
        alive_since_ms = seconds * 1000 + micros // 1000 - self._limits.lease_ms
        live = client.zrangebyscore(self._keys.workers, alive_since_ms, "+inf")
        with client.pipeline(transaction=False) as pipe:
            for worker in live:
                pipe.hget(self._keys.worker(worker.decode()), "refusal")
            return live, pipe.execute()

    def workers(self) -> list[WorkerRecord]:
        """Return the records of all known workers, by their last heartbeat, oldest first."""
        return self._store.retrying("workers", self._workers)

    def _workers(self) -> list[WorkerRecord]:
        client = self._store.control
        keys = self._keys
        seconds, micros = client.time()
        ids = [w.decode() for w in client.zrange(keys.workers, 0, -1)]
        if not ids:
            return []
        pipe = client.pipeline(transaction=False)
        for worker in ids:
            pipe.hgetall(keys.worker(worker))
            pipe.scard(keys.holds(worker))
        pipe.hmget(keys.suspects, ids)
        *replies, suspicions = pipe.execute()
        now_ms = seconds * 1000 + micros // 1000
        rows = zip(ids, replies[::2], replies[1::2], suspicions, strict=True)
        return [
            read_record(worker, written, holds, suspicion, now_ms)
            for worker, written, holds, suspicion in rows
        ]
