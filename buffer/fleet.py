"""The workers of a run: who lives, what each is doing, and what it heard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from buffer.control import ControlState
from buffer.control_line import ControlLine
from buffer.errors import Fenced, RunNotFound
from buffer.job import Job
from buffer.keys import Keys, valid_name
from buffer.limits import RunLimits
from buffer.rollout import PolicyVersion
from buffer.store import Store
from buffer.worker_record import read_record


@dataclass(frozen=True, slots=True)
class Pulse:
    """What a worker says of itself with a heartbeat. `heard`, the control epoch that it knew then, it keeps.
    `concurrency`: groups that it would have in work at once; 0 = it does not say. `requests`: what its engine has,
    None where it does not say. Since it started: groups `done` and `failed`, answers of judges, their `judging_ms`, and
    how many were failures; of the newest answers the median and the 99th percentile."""

    ack: int
    weights: PolicyVersion
    state: str
    tokens_per_s: float
    done: int
    heard: int = 0
    concurrency: int = 0
    requests: int | None = None
    failed: int = 0
    judged: int = 0
    judging_ms: int = 0
    judge_failures: int = 0
    judge_p50_ms: int = 0
    judge_p99_ms: int = 0


@dataclass(frozen=True, slots=True)
class Beat:
    """The answer: the control state, and the jobs whose leases are lost. `known` is False after an amnesia."""

    known: bool
    control: ControlState | None
    lost: tuple[Job, ...]


class Fleet:
    """Registers, hears and lists workers."""

    def __init__(self, store: Store, keys: Keys, limits: RunLimits) -> None:
        self._store, self._keys, self._limits = store, keys, limits

    def register(self, worker: str, nonce: str, facts: Mapping[str, str]) -> tuple[str, ControlState]:
        """Join, or join again. Returns the run's nonce and the control state; RunNotFound when there is none."""
        keys, worker = self._keys, valid_name("worker", worker)
        reply = self._store.call(
            "register",
            keys.slots(worker=worker),
            {"worker": worker, "nonce": nonce},
            tail_args=[part for pair in facts.items() for part in pair],
        )
        if reply[0] == "NO_RUN":
            raise RunNotFound(f"there is no run {keys.run!r} on this server", hint="`rolloutmq run CONFIG` makes it")
        return reply[1], ControlState.parse(reply[2:])

    def heartbeat(self, worker: str, nonce: str, pulse: Pulse, held: Sequence[Job]) -> Beat:
        """Renew the leases of `held`, hand in a receipt, hear the control state. Fenced by a newer one of its id."""
        reply = self._store.call(
            "heartbeat",
            self._keys.slots(worker=worker),
            {
                "worker": worker,
                "nonce": nonce,
                "lease_ms": self._limits.lease_ms,
                "ack": pulse.ack,
                "weights": str(pulse.weights),
                "state": pulse.state,
                "rate": f"{pulse.tokens_per_s:.1f}",
                "done": pulse.done,
                "concurrency": pulse.concurrency,
                "requests": "" if pulse.requests is None else pulse.requests,
                "failed": pulse.failed,
                "judged": pulse.judged,
                "judging_ms": pulse.judging_ms,
                "judge_failures": pulse.judge_failures,
                "judge_p50_ms": pulse.judge_p50_ms,
                "judge_p99_ms": pulse.judge_p99_ms,
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
        return Beat(True, ControlState.parse(reply[1:7]), tuple(held[int(number) - 1] for number in reply[7:]))

    def open_line(self, worker: str, nonce: str) -> ControlLine:
        """For hints and receipts of a registered worker; see there. Raises redis.RedisError."""
        return ControlLine(self._store, self._keys, worker, nonce)

    def deregister(self, worker: str, nonce: str) -> bool:
        """Leave. False when leases are still held; they will run out."""
        reply = self._store.call("deregister", self._keys.slots(worker=worker), {"worker": worker, "nonce": nonce})
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
        """Let a worker claim again that was barred; how many bad groups it had handed in (0: it was not)."""
        reply = self._store.call("admit", self._keys.slots(), {"worker": valid_name("worker", worker)})
        return int(reply[1])

    def workers(self) -> list[dict[str, str]]:
        """All known workers as their records say, with `id`, `silent_ms` and `holds`; of one that is barred for what
        it handed in, `bad_groups` and `barred_for_ms`."""
        return self._store.retrying("workers", self._workers)

    def _workers(self) -> list[dict[str, str]]:
        client, keys = self._store.control, self._keys
        seconds, micros = client.time()
        ids = [w.decode() for w in client.zrange(keys.workers, 0, -1)]
        pipe = client.pipeline(transaction=False)
        for worker in ids:
            pipe.hgetall(keys.worker(worker))
            pipe.scard(keys.holds(worker))
        if ids:
            pipe.hmget(keys.suspects, ids)
        replies = pipe.execute() if ids else []
        now_ms, rows = seconds * 1000 + micros // 1000, []
        for place, worker in enumerate(ids):
            record = read_record(replies[2 * place])
            silent = now_ms - int(record.get("seen_ms", 0))
            known = {"id": worker, "silent_ms": str(silent), "holds": str(replies[2 * place + 1])}
            rows.append(record | known | _barred(replies[-1][place], now_ms))
        return rows


def _barred(suspicion: bytes | None, now_ms: int) -> dict[str, str]:
    _, bad, barred_ms = (int(part) for part in (suspicion or b"0 0 0").split())
    return {"bad_groups": str(bad), "barred_for_ms": str(now_ms - barred_ms)} if barred_ms else {}
