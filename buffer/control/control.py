"""Pause, continue, weights, and who is the trainer and the producer (I7, I10).

Truth is the `control` hash and its epoch. The message on the channel of the same name is only a
hint that makes it quick: a worker that hears none learns of the change at its next claim or
heartbeat. The trainer's pauses (around weight updates) and the operator's are held apart, so that
the trainer's `continue_` does not undo a person's pause.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal

from buffer.control.histogram import Histogram, join_counts
from buffer.errors import Fenced, LostRun, RunNotFound, ScriptError
from buffer.model.ids import LANES, new_nonce
from buffer.model.limits import RunLimits
from buffer.model.rollout import PolicyVersion
from buffer.store.keys import Keys
from buffer.store.replies import opened, unfenced
from buffer.store.store import Store

Who = Literal["trainer", "operator"]
Role = Literal["trainer", "producer"]

ALL_LANES = "eval resume fresh"


class Mode(StrEnum):
    """What running work shall do; `lanes` of the control state say what may be claimed."""

    RUN = "run"
    DRAIN = "drain"
    ABORT = "abort"
    KEEP = "keep"
    FINISH = "finish"


@dataclass(frozen=True, slots=True)
class ControlState:
    """What every reply of claim, heartbeat and control carries."""

    epoch: int
    mode: Mode
    lanes: tuple[str, ...]
    weights: PolicyVersion
    weights_path: str
    weights_checksum: str

    @classmethod
    def parse_hint(cls, message: bytes) -> ControlState:
        """What the control channel carries: the same fields, a NUL between two. ScriptError if it
        is something else.
        """
        try:
            fields = message.decode().split("\0")
        except UnicodeDecodeError:
            raise _unreadable([repr(message)]) from None
        if len(fields) != 6:
            raise _unreadable(fields)
        return cls.parse(fields)

    @classmethod
    def parse(cls, fields: Sequence[str]) -> ControlState:
        """Of the fields that begin a reply. ScriptError where somebody wrote nonsense into
        `control`.
        """
        try:
            epoch, mode, lanes, label, path, checksum = fields[:6]
            weights = PolicyVersion.parse(label)
            state = cls(int(epoch), Mode(mode), tuple(lanes.split()), weights, path, checksum)
        except ValueError:
            raise _unreadable(fields) from None
        if state.epoch < 0 or weights.version < 0 or not set(state.lanes) <= set(LANES):
            raise _unreadable(fields)
        return state


def silence_ms(now_ms: int, seen_ms: int) -> int:
    """Since a holder of a role was seen. If that lies ahead of now, it is as long ago: the clock
    was stepped back, and whoever lives has beaten since. `silence_ms` in
    lua/include/role_silence.lua decides the same.
    """
    return abs(now_ms - seen_ms)


@dataclass(frozen=True, slots=True)
class RoleHolder:
    """Who holds a role; times in milliseconds of the server's clock. `nonce` is empty where it was
    given up.
    """

    role: Role
    nonce: str
    seen_ms: int
    now_ms: int
    timeout_ms: int
    name: str = ""
    """where a producer runs"""

    @property
    def silent_ms(self) -> int | None:
        """Since its last heartbeat; None where nobody ever held the role."""
        return silence_ms(self.now_ms, self.seen_ms) if self.seen_ms else None

    @property
    def is_alive(self) -> bool:
        return bool(self.nonce) and self.silent_ms is not None and self.silent_ms < self.timeout_ms

    def __str__(self) -> str:
        if self.silent_ms is None:
            return f"no {self.role} was ever opened"
        if not self.nonce:
            return f"the last {self.role} left in order {self.silent_ms / 1000:.0f} s ago"
        word = (
            "is alive" if self.is_alive else f"was last heard of {self.silent_ms / 1000:.0f} s ago"
        )
        where = f" ({self.name})" if self.name else ""
        return f"the {self.role} {self.nonce[:8]}…{where} {word}"


def _unreadable(fields: Sequence[str]) -> ScriptError:
    return ScriptError(
        f"this is no control state: {list(fields[:6])!r:.200}",
        hint="HGETALL rmq:{RUN}:control shows what the run has; only trainer and operator may write it",
    )


class RunControl:
    """Reads and changes the control state of one run."""

    def __init__(self, store: Store, keys: Keys, limits: RunLimits) -> None:
        self._store = store
        self._keys = keys
        self._limits = limits

    def state(self) -> ControlState:
        names = ("epoch", "mode", "lanes", "weights", "weights_path", "weights_checksum")
        fields: list[Any] = self._store.retrying(
            "control", lambda: self._store.control.hmget(self._keys.control, *names)
        )
        if fields[0] is None:
            raise self._no_run()
        return ControlState.parse(
            [field.decode(errors="replace") if field else "" for field in fields]
        )

    def set_mode(
        self, who: Who, mode: Mode, *, lanes: str = "", nonce: str = "", orphan: bool = False
    ) -> ControlState:
        """Change the mode for one holder. `lanes` that stay open: none by default, all in run mode.

        `orphan`: the operator's RUN also ends the pause of a trainer that has left or fallen
        silent.
        """
        reply = self._store.call(
            "control",
            self._keys.slots(),
            {
                "operation": new_nonce(),
                "who": who,
                "mode": mode.value,
                "lanes": ALL_LANES if mode is Mode.RUN else lanes,
                "nonce": nonce,
                "orphan_ms": self._limits.role_timeout_ms if orphan and who == "operator" else "",
            },
        )
        if reply[0] == "NO_RUN":
            raise self._no_run()
        return ControlState.parse(unfenced(reply, "trainer")[1:])

    def publish_weights(
        self, nonce: str, weights: PolicyVersion, path: str, checksum: str
    ) -> ControlState:
        """Name the newest weights; workers that do not have them may not claim."""
        reply = self._store.call(
            "publish_weights",
            self._keys.slots(),
            {"nonce": nonce, "weights": str(weights), "path": path, "checksum": checksum},
        )
        return ControlState.parse(unfenced(reply, "trainer")[1:])

    def open_producer(
        self, nonce: str, *, run_nonce: str = "", take_over: bool = False
    ) -> ControlState:
        """Become the active producer, under the name of this process. Raises RoleHeld or LostRun."""
        keys = self._keys
        reply = self._store.call(
            "producer_open",
            keys.slots(),
            {
                "run_nonce": run_nonce,
                "nonce": nonce,
                "take_over": int(take_over),
                "timeout_ms": self._limits.role_timeout_ms,
                "name": f"process {os.getpid()} on {socket.gethostname()}"[:128],
            },
            durable=True,
        )
        return ControlState.parse(opened(reply, "producer", keys.run)[1:])

    def report_curriculum(self, nonce: str, step: int, reason: str) -> None:
        """The producer says why the curriculum's answer after `step` is not followed; "": it is.
        Raises Fenced.
        """
        text = reason.encode(errors="replace")[:2000].decode(errors="ignore")
        reply = self._store.call(
            "curriculum", self._keys.slots(), {"nonce": nonce, "step": step, "reason": text}
        )
        unfenced(reply, "producer")

    def beat(
        self,
        role: Role,
        nonce: str,
        *,
        closing: bool = False,
        waited_s: float = 0.0,
        pauses: Histogram | None = None,
    ) -> ControlState:
        """Renew the hold on a role, or give it up if `closing`; return the control state.

        `waited_s` and `pauses` are the trainer's statistics since it was opened. Raises Fenced;
        LostRun if the server came back empty and has never seen a holder of that role.
        """
        reply = self._store.call(
            "beat",
            self._keys.slots(),
            {
                "role": role,
                "nonce": nonce,
                "closing": int(closing),
                "waited_ms": int(waited_s * 1000),
                "pause_ms": int(pauses.total_s * 1000) if pauses else 0,
                "pause_buckets": join_counts(pauses.counts) if pauses else "",
            },
        )
        with self.telling_loss(role):
            return ControlState.parse(unfenced(reply, role)[1:])

    @contextmanager
    def telling_loss(self, role: Role) -> Iterator[None]:
        """Who is refused by a server that never saw a holder of the role has lost the run, and not
        the role.
        """
        try:
            yield
        except Fenced as error:
            control = self._store.control
            key = self._keys.control
            if self._store.retrying("role", lambda: control.hexists(key, role)):
                raise
            what = (
                f"the server does not hold this run {self._keys.run!r} any more: its data was lost"
            )
            hint = "`rolloutmq train CONFIG --regenerate` goes on from the newest checkpoint; start the others again"
            raise LostRun(what, hint=hint) from error

    def holder(self, role: Role) -> RoleHolder:
        """Who holds a role, and since when it is silent. One round trip."""

        def ask() -> list[Any]:
            with self._store.control.pipeline(transaction=False) as pipe:
                pipe.hmget(self._keys.control, role, f"{role}_seen_ms", f"{role}_name")
                pipe.execute_command("TIME")
                return list(pipe.execute())

        (nonce, seen, name), (seconds, micros) = self._store.retrying("role", ask)
        now_ms = int(seconds) * 1000 + int(micros) // 1000
        timeout_ms = self._limits.role_timeout_ms
        return RoleHolder(
            role,
            (nonce or b"").decode(),
            int(seen or 0),
            now_ms,
            timeout_ms,
            (name or b"").decode(),
        )

    def _no_run(self) -> RunNotFound:
        return RunNotFound(
            f"there is no run {self._keys.run!r} on this server",
            hint="its data was lost, or never there",
        )
