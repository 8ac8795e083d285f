"""Who holds a role of a run, as the server knows it (I7), and what its loop does at the moment."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

SHORT_S = 1.0  # work that takes less is not reported


class Work:
    """What the loop of a process does, read by its heartbeat thread. `turns` stops if it hangs."""

    def __init__(self) -> None:
        self.turns = 0
        self._current: tuple[str, float] | None = None

    @contextmanager
    def on(self, what: str) -> Iterator[None]:
        self._current = (what, time.monotonic())
        try:
            yield
        finally:
            self._current = None

    def now(self) -> tuple[str, float]:
        """Return what the loop does, and for how many seconds; ("", 0) if that is short."""
        what, since_s = self._current or ("", 0.0)
        busy_s = time.monotonic() - since_s
        return (what, busy_s) if what and busy_s >= SHORT_S else ("", 0.0)


Role = Literal["trainer", "producer"]

OF_A_HOLDER = ("seen_ms", "name", "turns", "doing", "doing_ms")
"""Fields of the control hash about a holder, after "trainer_" or "producer_"."""


def silence_ms(now_ms: int, seen_ms: int) -> int:
    """Return how long the holder of a role has been silent, as `lua/include/role_silence.lua` does.

    A last heartbeat in the future counts as equally long ago: the clock was stepped back, and a
    live holder has sent heartbeats since.
    """
    return abs(now_ms - seen_ms)


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
        """The time since its last heartbeat; None if the role was never opened."""
        return silence_ms(self.now_ms, self.seen_ms) if self.seen_ms else None

    @property
    def is_alive(self) -> bool:
        """Whether the holder's last heartbeat is younger than the timeout."""
        return bool(self.nonce) and self.silent_ms is not None and self.silent_ms < self.timeout_ms

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
