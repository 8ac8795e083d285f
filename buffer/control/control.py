"""Read and change the control state of a run: pauses, weights, roles (I7, I10); read its events.

The `control` hash and its epoch decide. A message on the channel only saves time: a worker that
misses it learns of the change with its next claim or heartbeat. The trainer's pauses and the
operator's are kept apart, so `continue_` of the trainer does not end an operator's pause.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal, NamedTuple

from buffer.control.events import ReportedStep
from buffer.control.worker_record import Histogram, join_counts
from buffer.errors import Fenced, RunDamaged, RunNotFound
from buffer.ids import LANES, new_nonce
from buffer.redis.errors import lost_run
from buffer.redis.eviction import EvictionWatch
from buffer.redis.key_fields import HINT, key_gone
from buffer.redis.scripts import opened, unfenced
from buffer.redis.store import RunContext
from buffer.wire.rollout import PolicyVersion

Who = Literal["trainer", "operator"]

ALL_LANES = " ".join(LANES)
STATE_FIELDS = (
    *("epoch", "mode", "lanes", "weights", "weights_path", "weights_checksum"),
    *("next_weights", "next_weights_path", "next_weights_checksum"),
)
"""The fields that `control_state` of lua/shared puts into replies, in this order."""


class Mode(StrEnum):
    """What running work must do; `lanes` of the control state are those that may be claimed."""

    RUN = "run"
    DRAIN = "drain"  # finish what runs, claim nothing
    ABORT = "abort"  # hand back what runs, with its tokens
    KEEP = "keep"  # freeze what runs
    FINISH = "finish"  # finish what runs, then leave: the run is over


class LocatedWeights(NamedTuple):
    """A version of weights: where it is, and its checksum, as `PublishedWeights` has them."""

    weights: PolicyVersion
    path: str
    checksum: str


@dataclass(frozen=True, slots=True)
class ControlState:
    """The control state, as every reply of claim, heartbeat and control carries it."""

    epoch: int
    mode: Mode
    lanes: tuple[str, ...]
    weights: PolicyVersion
    weights_path: str
    weights_checksum: str
    announced: LocatedWeights | None = None
    """the next weights, which workers fetch while they sample with these"""

    @property
    def published(self) -> LocatedWeights:
        """Return the newest weights, without which nothing may be claimed."""
        return LocatedWeights(self.weights, self.weights_path, self.weights_checksum)

    @classmethod
    def parse(cls, fields: Sequence[str]) -> ControlState:
        """Return the state in the first nine of `fields`. Raises RunDamaged if it is invalid."""
        try:
            epoch, mode, lanes, *located = fields[: len(STATE_FIELDS)]
            published, following = (_located(*located[i : i + 3]) for i in (0, 3))
            if published is None:
                raise _unreadable(fields)
            state = cls(int(epoch), Mode(mode), tuple(lanes.split()), *published, following)
        except ValueError:
            raise _unreadable(fields) from None
        if state.epoch < 0 or not set(state.lanes) <= set(LANES):
            raise _unreadable(fields)
        return state


def _located(label: str, path: str, checksum: str) -> LocatedWeights | None:
    """Return the weights of three fields of a state; None without a label. Raises ValueError."""
    if not label:
        return None
    weights = PolicyVersion.parse(label)
    if weights.version < 0:
        raise ValueError(f"a negative version: {label}")
    return LocatedWeights(weights, path, checksum)


def _unreadable(fields: Sequence[str]) -> RunDamaged:
    return RunDamaged(
        "rmq:{RUN}:control is gone, or has no valid control state: "
        f"{list(fields[: len(STATE_FIELDS)])!r:.200}",
        hint=HINT,
    )


SHORT_S = 1.0  # work that takes less is not reported
WAITS_FOR = "waits for "  # begins what a loop does that waits, perhaps for days, and does not hang


class Work:
    """What the loop of a process does, read by its heartbeat thread. `turns` stops if it hangs."""

    def __init__(self) -> None:
        self.turns = 0
        self._current = ("", 0.0)

    @contextmanager
    def on(self, what: str) -> Iterator[None]:
        self._current = (what, time.monotonic())
        try:
            yield
        finally:
            self._current = ("", 0.0)

    def wait_for(self, tasks: Sequence[str]) -> None:
        """Report that the loop waits until these tasks are resumed; (): it does not."""
        # lua/beat.lua accepts 256 characters
        what = (WAITS_FOR + ", ".join(tasks))[:256] if tasks else ""
        if what != self._current[0]:
            self._current = (what, time.monotonic())

    def now(self) -> tuple[str, float]:
        """Return what the loop does, and for how many seconds; ("", 0) if that is short."""
        what, since_s = self._current
        busy_s = time.monotonic() - since_s
        return (what, busy_s) if what and busy_s >= SHORT_S else ("", 0.0)


Role = Literal["trainer", "producer"]

OF_A_HOLDER = ("seen_ms", "name", "turns", "doing", "doing_ms")
"""Fields of the control hash about a holder, after "trainer_" or "producer_"."""


@dataclass(frozen=True, slots=True)
class RoleHolder:
    """The newest holder of a role; times are in milliseconds of the server's clock."""

    role: Role
    nonce: str  # empty if the role was given up, or never opened
    seen_ms: int  # its last heartbeat; 0 if the role was never opened
    now_ms: int
    timeout_ms: int
    name: str = ""  # where a producer runs
    turns: int = 0  # of the loop of the process
    doing: str = ""  # what its loop is busy with; empty if with nothing for long
    doing_ms: int = 0  # for how long, at its last heartbeat

    @classmethod
    def parse(
        cls, role: Role, control: Mapping[str, str], now_ms: int, timeout_ms: int
    ) -> RoleHolder:
        return cls(
            role,
            nonce=control.get(role, ""),
            seen_ms=int(control.get(f"{role}_seen_ms", 0)),
            now_ms=now_ms,
            timeout_ms=timeout_ms,
            name=control.get(f"{role}_name", ""),
            turns=int(control.get(f"{role}_turns", 0)),
            doing=control.get(f"{role}_doing", ""),
            doing_ms=int(control.get(f"{role}_doing_ms", 0)),
        )

    @property
    def silent_ms(self) -> int | None:
        """The time since its last heartbeat; None if it was never opened.

        A heartbeat in the future counts as equally long ago: the clock was stepped back, and a live
        holder has sent heartbeats since (as in lua/shared/clock.lua).
        """
        return abs(self.now_ms - self.seen_ms) if self.seen_ms else None

    @property
    def is_alive(self) -> bool:
        """Whether the holder's last heartbeat is younger than the timeout."""
        return bool(self.nonce) and self.silent_ms is not None and self.silent_ms < self.timeout_ms

    @property
    def waits_for(self) -> list[str]:
        """The stopped tasks that a trainer waits for."""
        tasks = self.doing.removeprefix(WAITS_FOR)
        return tasks.split(", ") if tasks != self.doing else []

    @property
    def word(self) -> str:
        """The state for screens and programs: never opened, closed, alive or silent."""
        if self.silent_ms is None:
            return "never opened"
        if not self.nonce:
            return "closed"
        return "alive" if self.is_alive else "silent"

    def __str__(self) -> str:
        if self.silent_ms is None:
            return f"no {self.role} was ever opened"
        silent_s = f"{self.silent_ms / 1000:.0f} s ago"
        if not self.nonce:
            return f"the last {self.role} gave its role up {silent_s}"
        where = f" ({self.name})" if self.name else ""
        state = "is alive" if self.is_alive else f"sent its last heartbeat {silent_s}"
        return f"the {self.role} {self.nonce[:8]}…{where} {state}"


class _Change(NamedTuple):
    """The newest change of the mode by this process's trainer: a server may lose it."""

    nonce: str = ""
    number: int = 0
    mode: str = ""
    lanes: str = ""


class RunControl:
    def __init__(self, context: RunContext) -> None:
        self._store, self._keys, self._limits, _ = context
        self._change = _Change()

    def state(self) -> ControlState:
        """Return the control state. Raises RunNotFound."""
        fields: list[Any] = self._store.ask("control", "HMGET", self._keys.control, *STATE_FIELDS)
        if fields[0] is None:
            if self._is_damaged():
                raise key_gone(self._keys.control)
            raise RunNotFound(
                f"there is no run {self._keys.run!r} on this server",
                hint="it was never created there, or the server lost its data",
            )
        return ControlState.parse([(field or b"").decode(errors="replace") for field in fields])

    def set_mode(
        self, who: Who, mode: Mode, *, lanes: str = "", nonce: str = "", orphan: bool = False
    ) -> ControlState:
        """Change the mode that the trainer or the operator wants; return the new control state.

        `lanes` stay open: none by default, all in run mode. `orphan`: the operator's RUN also ends
        the pause of a trainer that left or fell silent. Raises Fenced, LostRun, RunDamaged.
        """
        lanes = ALL_LANES if mode is Mode.RUN else lanes
        before = self._change.number if self._change.nonce == nonce else 0
        change = _Change(nonce, before + 1, mode.value, lanes)
        reply = self._store.call(
            "control",
            self._keys.slots(),
            {
                "operation": new_nonce(),
                "who": who,
                "mode": mode.value,
                "lanes": lanes,
                "nonce": nonce,
                "change": change.number if who == "trainer" else 0,
                "orphan_ms": self._limits.role_timeout_ms if orphan and who == "operator" else "",
            },
        )
        match unfenced(reply, "trainer"):
            case ["NO_RUN"]:
                raise key_gone(self._keys.control)
            case [_, *state]:
                if who == "trainer":
                    self._change = change
                return ControlState.parse(state)
            case _:
                raise _unreadable(reply)

    def publish_weights(
        self,
        nonce: str,
        weights: PolicyVersion,
        path: str,
        checksum: str,
        *,
        stage: Literal["next", "newest"] = "newest",
    ) -> ControlState:
        """Record weights: "newest" to claim with, or "next" to fetch in advance. Raises Fenced."""
        facts = {"weights": str(weights), "path": path, "checksum": checksum, "stage": stage}
        reply = self._store.call("publish_weights", self._keys.slots(), {"nonce": nonce, **facts})
        _, *state = unfenced(reply, "trainer")
        return ControlState.parse(state)

    def report(
        self, nonce: str, step: int, metrics: Mapping[str, float], *, task: str = ""
    ) -> None:
        """Publish the metrics of a step or evaluation that are in `REPORTED`. Raises Fenced."""
        entry = ReportedStep.of(step, metrics).encode()
        reply = self._store.call(
            "report", self._keys.slots(), {"nonce": nonce, "task": task, "entry": entry}
        )
        unfenced(reply, "trainer")

    def open_producer(
        self, nonce: str, *, run_nonce: str = "", take_over: bool = False
    ) -> ControlState:
        """Make this process the active producer. Raises RoleHeld (not if `take_over`), LostRun."""
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
        _, *state = opened(reply, "producer", keys.run)
        return ControlState.parse(state)

    def renew_role(
        self,
        role: Role,
        nonce: str,
        *,
        closing: bool = False,
        waited_s: float = 0.0,
        pauses: Histogram | None = None,
        work: Work | None = None,
    ) -> ControlState:
        """Renew the hold on a role, or give it up if `closing`; return the control state.

        `waited_s` and `pauses` are the trainer's statistics since it was opened. Raises Fenced;
        LostRun if the server came back empty and has never seen a holder of that role.
        """
        what, busy_s = work.now() if work else ("", 0.0)
        change = self._change if self._change.nonce == nonce else _Change()
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
                "turns": work.turns if work else 0,
                "doing": what,
                "doing_ms": int(busy_s * 1000),
                "change": change.number,
                "mode": change.mode,
                "lanes": change.lanes,
            },
        )
        with self.explaining_loss(role):
            _, *state = unfenced(reply, role)
        return ControlState.parse(state)

    @contextmanager
    def explaining_loss(self, role: Role) -> Iterator[None]:
        """Turn Fenced into LostRun if the server lost its data: it never saw a holder of `role`."""
        try:
            yield
        except Fenced as error:
            if self._store.ask("role", "HEXISTS", self._keys.control, role):
                raise
            if self._is_damaged():
                raise key_gone(self._keys.control) from error
            raise lost_run(f"it knows no {role} of {self._keys.run!r}") from error

    def holder(self, role: Role) -> RoleHolder:
        names = (role, *(f"{role}_{name}" for name in OF_A_HOLDER))
        read = ("HMGET", self._keys.control, *names)
        fields, (seconds, micros) = self._store.send("role", [read, ("TIME",)])
        known = zip(names, fields, strict=True)
        control = {name: field.decode() for name, field in known if field is not None}
        now_ms = int(seconds) * 1000 + int(micros) // 1000
        return RoleHolder.parse(role, control, now_ms, self._limits.role_timeout_ms)

    def watch_evictions(self, watch: EvictionWatch) -> None:
        """Warn of a server that may evict keys of the run. Raises StoreUnsafe once it did."""
        watch.look(self._store.eviction(), is_allowed=self._store.allow_unsafe)

    def _is_damaged(self) -> bool:
        keys = (self._keys.meta, self._keys.control)
        return self._store.send("run", [("EXISTS", key) for key in keys]) == [1, 0]
