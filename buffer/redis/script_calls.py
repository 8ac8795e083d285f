"""What calls of scripts are made of: replies, durability, and the order of uploads.

A reply is a list of a status word (OK, or a refusal) and fields. A durable call waits for the
server's disk and for replicas (I6). WAIT and WAITAOF count the writes of their own connection, and
a repeated call may have made none, so a write of their own precedes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from redis.exceptions import NoPermissionError, NoScriptError

from buffer.errors import Fenced, LostRun, RoleHeld, ScriptError
from buffer.redis.connection.bulk_io import Command, pipelined
from buffer.redis.connection.retry import NotDurable
from buffer.redis.keys import clock_beside, sync_beside
from buffer.redis.scripts import Arg, KeysByName, Script


def unknown_reply(script: str, reply: Sequence[Any]) -> ScriptError:
    return ScriptError(
        f"{script}: unknown reply {list(reply)}",
        hint="do all processes of the run have the same version of rolloutmq?",
    )


def unfenced(reply: list[str], role: str) -> list[str]:
    """Return the reply of a script that only the holder of a role may run. Raises Fenced."""
    status, *_ = reply
    if status == "FENCED":
        raise Fenced(f"this is no longer the {role} of the run: another one was opened")
    return reply


def opened(reply: list[str], role: str, run: str) -> list[str]:
    """Return the reply of trainer_open or producer_open. Raises LostRun or RoleHeld."""
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
    return RoleHeld(
        f"run {run!r} has a {role} that was alive {silent_ms / 1000:.1f} s ago",
        hint="stop it, or open this one with take_over=True, which fences the other",
        command_hint="stop it, or start this one with --take-over, which fences the other",
    )


Advance = Callable[[str, int], object]
"""Receives the name of the current stage, and the number of items finished so far."""


def no_advance(what: str, done: int) -> None:
    """Ignore progress."""


WAIT_MS = 5_000
"""The longest wait for disk and replicas in one attempt; well below the socket's time-out."""


class Durability(NamedTuple):
    """Where a write must be before it is answered."""

    replicas: int
    disk: bool

    @property
    def must_wait(self) -> bool:
        return self.disk or self.replicas > 0

    def behind_script(self, sync: str, key: str) -> list[Command]:
        """Return commands to follow a script on keys of a run; `sync` is the hash of sync.lua."""
        if not self.must_wait:
            return []
        # WAIT and not WAITAOF for replicas: they report their disks only once a second (measured:
        # 0.5 s a call)
        disk = [("WAITAOF", 1, 0, WAIT_MS)] if self.disk else []
        return [("EVALSHA", sync, 1, clock_beside(key)), ("WAIT", self.replicas, WAIT_MS), *disk]

    def behind_payloads(self, key: str) -> list[Command]:
        """Return commands to follow writes of payloads on one node, which has its own replicas."""
        return [("SET", sync_beside(key), 1, "PX", 1), ("WAIT", self.replicas, WAIT_MS)]

    def check(self, answers: Sequence[Any]) -> None:
        """Raise NotDurable if the answers to these commands show that something is missing."""
        if not answers:
            return
        _, replicas, *disks = answers
        if [on_disk for on_disk, _ in disks] == [0]:
            raise NotDurable(f"not on the server's disk after {WAIT_MS} ms")
        if replicas < self.replicas:
            raise NotDurable(
                f"only {replicas} of {self.replicas} replicas have it after {WAIT_MS} ms"
            )


_LARGE_BYTES = 32 * 2**10
"""A server reads a value of this size by itself, and smaller ones together."""


_TOGETHER = 8  # payloads after which their scripts are called


class ScriptCall(NamedTuple):
    """Keys and arguments of a script by the names in its header; see `Script.command`."""

    keys: KeysByName
    args: Mapping[str, Arg]
    tail_keys: Sequence[str | KeysByName] = ()
    tail_args: Sequence[Arg] = ()


Upload = tuple[Sequence[Command], ScriptCall]
"""The commands that store a payload, and the call of the script that accepts it."""


def in_order(script: Script, uploads: Iterable[Upload]) -> Iterator[Command]:
    """Yield the commands of uploads: large values at once, small ones and calls after several.

    A server that writes to disk before it answers writes once for all small commands in a row.
    """
    later: list[Command] = []
    for number, (payload, call) in enumerate(uploads, 1):
        for command in payload:
            if _is_large(command):
                yield command
            else:
                later.append(command)
        later.append(script.command(*call))
        if number % _TOGETHER == 0:
            yield from later
            later = []
    yield from later


def _is_large(command: Command) -> bool:
    value = command[2]  # of SET
    return isinstance(value, list) and sum(map(len, value)) >= _LARGE_BYTES


def load_missing(client: Any, scripts: Iterable[Script], missing: NoScriptError) -> None:
    """Load the scripts that a server lacks. Raises `missing`, which is transient, without ACL."""
    named = list(scripts)
    try:
        # after a restart, a whole fleet finds that they are gone: most of it sends no source
        known = client.script_exists(*(script.sha for script in named))
        lacks = [script for script, is_known in zip(named, known, strict=True) if not is_known]
        pipelined(client, [("SCRIPT LOAD", script.source) for script in lacks])
    except NoPermissionError:
        raise missing from None


def decoded(reply: Sequence[Any]) -> list[Any]:
    return [item.decode() if isinstance(item, bytes) else item for item in reply]
