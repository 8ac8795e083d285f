"""Replies of scripts as results and typed errors.

A reply is a list: a status word, which is OK or names a refusal, and then fields. The module that
calls a script matches the status words of its header, and makes a typed result of the fields.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from buffer.errors import Fenced, LostRun, RoleHeld, ScriptError


def unknown_reply(script: str, reply: Sequence[Any]) -> ScriptError:
    """Return the error for a reply that the caller of a script does not know."""
    return ScriptError(
        f"{script}: unknown reply {list(reply)}",
        hint="do all processes of the run have the same version of rolloutmq?",
    )


def unfenced(reply: list[str], role: str) -> list[str]:
    """Return the reply of a script that only the holder of a role may run, or raise Fenced."""
    status, *_ = reply
    if status == "FENCED":
        raise Fenced(f"this is no longer the {role} of the run: another one was opened")
    return reply


def opened(reply: list[str], role: str, run: str) -> list[str]:
    """Return the reply of trainer_open or producer_open; raise LostRun or RoleHeld."""
    match reply:
        case ["LOST", found, *_]:
            holds = f"run {found[:8]}…" if found else "no run of that name"
            raise LostRun(
                f"this server holds {holds}, not the run {run!r} that this process knows",
                hint="connect to the server of this run, restore its data, or start a run with "
                "another name",
            )
        case ["HELD", silent_ms, *_]:
            raise role_held(role, run, int(silent_ms))
    return reply


def role_held(role: str, run: str, silent_ms: int) -> RoleHeld:
    """Return the error of a process that wants a role of which the holder is alive."""
    return RoleHeld(
        f"run {run!r} has a {role} that was alive {silent_ms / 1000:.1f} s ago",
        hint="stop it, or open this one with take_over=True, which fences the other",
        command_hint="stop it, or start this one with --take-over, which fences the other",
    )


Advance = Callable[[str, int], object]
"""Receives the name of the current stage, and the number of items that it has finished so far."""


def no_advance(what: str, done: int) -> None:
    """Ignore progress, for callers that show none."""
