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
from buffer.store import Store
from buffer.worker_record import Pulse, WorkerRecord, read_record


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

    def workers(self) -> list[WorkerRecord]:
        """Return the records of all known workers, by their last heartbeat, oldest first."""
        return self._store.retrying("workers", self._workers)

    def _workers(self) -> list[WorkerRecord]:
        client, keys = self._store.control, self._keys
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
        return [read_record(worker, written, holds, suspicion, now_ms) for worker, written, holds, suspicion in rows]
