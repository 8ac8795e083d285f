"""The workers of a run: who lives, what each is doing, and what it heard.

What a worker reports with a heartbeat, and the record of it that the server keeps.

A worker may write anything into its record: a number that is none counts as not written, any text
is kept as it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any

from buffer.control.control import ControlState
from buffer.control.control_line import ControlLine
from buffer.control.histogram import JUDGE_BOUNDS_S, Histogram, join_counts, parse_counts
from buffer.errors import Fenced, RunNotFound
from buffer.model.ids import valid_name
from buffer.model.job import Job
from buffer.model.limits import RunLimits
from buffer.model.rollout import PolicyVersion
from buffer.store.keys import Keys
from buffer.store.store import Store


class WorkerState(StrEnum):
    """What a worker of this project does. A worker in another language may report any other word."""

    STARTING = "starting"
    """registered, and no heartbeat yet"""
    IDLE = "idle"
    """holds no group and may claim"""
    WORKING = "working"
    PAUSED = "paused"
    DRAINING = "draining"
    """finishes what it holds, then leaves"""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerNumbers:
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
class Pulse(WorkerNumbers):
    """What a worker reports with a heartbeat. `ack`: the control epoch carried out. `heard`: the
    newest control epoch known when the pulse was taken; it is not sent.
    """

    ack: int
    weights: PolicyVersion
    state: WorkerState
    heard: int = 0

    def arguments(self) -> dict[str, str | int]:
        """Return the arguments of the script `heartbeat` that come from a pulse, by name."""
        numbers = {each.name: getattr(self, each.name) for each in fields(WorkerNumbers)}
        numbers["tokens_per_s"] = f"{self.tokens_per_s:.1f}"
        numbers["requests"] = "" if self.requests is None else self.requests
        numbers["judge_buckets"] = join_counts(self.judge_buckets)
        return {"ack": self.ack, "weights": str(self.weights), "state": self.state.value, **numbers}


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRecord(WorkerNumbers):
    """One worker as the server knows it. Numbers that were not written are 0 (None for `requests`),
    texts are empty.

    `silent_ms`: since its last heartbeat. `holds`: groups that it has leases for. `bad_groups` and
    `barred_for_ms` are None unless the worker is barred for what it handed in.
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
        return self.barred_for_ms is not None

    def is_live(self, lease_ms: int) -> bool:
        """Return whether a pause waits for this worker: its last heartbeat is younger than a lease."""
        return self.silent_ms < lease_ms


OF_THE_READER = ("id", "silent_ms", "holds", "bad_groups", "barred_for_ms", "facts")
"""Fields that do not come from the hash in Redis: what a worker writes there under these names is
ignored.
"""

_PRIVATE = ("nonce", "claim", "claimed")


def read_record(
    worker: str, written: Mapping[bytes, bytes], holds: int, suspicion: bytes | None, now_ms: int
) -> WorkerRecord:
    """Return the record of `worker` from its hash, the size of its set of leases and its entry in
    `suspects`.
    """
    texts = {
        name.decode(errors="replace"): value.decode(errors="replace")
        for name, value in written.items()
    }
    parsed = {name: parse(texts[name]) for name, parse in _PARSERS.items() if name in texts}
    known: dict[str, Any] = {name: value for name, value in parsed.items() if value is not None}
    facts = {
        name: text
        for name, text in texts.items()
        if name not in (*_PARSERS, *OF_THE_READER, *_PRIVATE)
    }
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
    return (
        float(text)
        if re.fullmatch(r"\d{1,15}(\.\d{1,20})?(e[+-]?\d{1,2})?", text, re.ASCII)
        else None
    )


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
class Beat:
    """The answer: the control state, and the jobs whose leases are lost. `known` is False after an
    amnesia.
    """

    known: bool
    control: ControlState | None
    lost: tuple[Job, ...]


class Fleet:
    """Registers, hears and lists workers."""

    def __init__(self, store: Store, keys: Keys, limits: RunLimits) -> None:
        self._store = store
        self._keys = keys
        self._limits = limits

    def register(
        self, worker: str, nonce: str, facts: Mapping[str, str]
    ) -> tuple[str, ControlState]:
        """Join, or join again. Returns the run's nonce and the control state; RunNotFound when
        there is none.
        """
        keys = self._keys
        worker = valid_name("worker", worker)
        reply = self._store.call(
            "register",
            keys.slots(worker=worker),
            {"worker": worker, "nonce": nonce},
            tail_args=[part for pair in facts.items() for part in pair],
        )
        if reply[0] == "NO_RUN":
            raise RunNotFound(
                f"there is no run {keys.run!r} on this server",
                hint="`rolloutmq run CONFIG` makes it",
            )
        return reply[1], ControlState.parse(reply[2:])

    def heartbeat(self, worker: str, nonce: str, pulse: Pulse, held: Sequence[Job]) -> Beat:
        """Renew the leases of `held`, hand in a receipt, hear the control state. Fenced by a newer
        one of its id.
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
            tail_args=[part for job in held for part in (job.gid, job.token)],
        )
        if reply[0] == "REPLACED":
            raise Fenced(
                f"another process registered as worker {worker!r}; this one is not wanted any more",
                hint="give every worker an --id of its own",
            )
        if reply[0] == "UNKNOWN":
            return Beat(False, None, tuple(held))
        return Beat(
            True,
            ControlState.parse(reply[1:7]),
            tuple(held[int(number) - 1] for number in reply[7:]),
        )

    def open_line(self, worker: str, nonce: str) -> ControlLine:
        """For hints and receipts of a registered worker; see there. Raises redis.RedisError."""
        return ControlLine(self._store, self._keys, worker, nonce)

    def deregister(self, worker: str, nonce: str) -> bool:
        """Leave. False when leases are still held; they will run out."""
        reply = self._store.call(
            "deregister", self._keys.slots(worker=worker), {"worker": worker, "nonce": nonce}
        )
        return bool(reply[0] != "HOLDS")

    def fence(self, worker: str) -> int:
        """Revoke all that a worker holds, slice by slice, and forget it. Returns how many groups."""
        revoked = 0
        while True:
            reply = self._fence(worker)
            revoked += int(reply[1])
            if int(reply[2]) == 0:
                return revoked

    def _fence(self, worker: str) -> list[str]:
        return self._store.call(
            "fence_worker",
            self._keys.slots(worker=worker),
            {"worker": worker, "max_tries": self._limits.max_tries, "limit": 200},
        )

    def admit(self, worker: str) -> int:
        """Let a worker claim again that was barred; how many bad groups it had handed in (0: it was
        not).
        """
        reply = self._store.call(
            "admit", self._keys.slots(), {"worker": valid_name("worker", worker)}
        )
        return int(reply[1])

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
