"""Replies of scripts as results and typed errors."""

from __future__ import annotations

from collections.abc import Callable

from buffer.errors import Fenced, LostRun, RoleHeld


def unfenced(reply: list[str], role: str) -> list[str]:
    """The reply of a script that only the holder of a role may run."""
    if reply[0] == "FENCED":
        raise Fenced(f"this is no longer the {role} of the run: another one was opened")
    return reply


def opened(reply: list[str], role: str, run: str) -> list[str]:
    """The reply of trainer_open or producer_open, its refusals turned into errors."""
    if reply[0] == "LOST":
        found = f"run {reply[1][:8]}…" if reply[1] else "no run of that name"
        raise LostRun(
            f"this server holds {found}, not the run {run!r} that this process knows",
            hint="connect to the server of this run, restore its data, or start a run with another name",
        )
    if reply[0] == "HELD":
        raise RoleHeld(
            f"run {run!r} has a {role} that was alive {int(reply[1]) / 1000:.1f} s ago",
            hint=f"stop it, or open this one with --take-over, which fences the other {role}",
        )
    return reply


Advance = Callable[[str, int], object]
"""Told what is being done, and how many items of it are done by now."""


def no_advance(what: str, done: int) -> None:
    """For callers that show nothing."""
