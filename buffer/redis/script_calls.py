"""Calls of scripts on one server: one, several in one round trip, or behind payloads.

A reply is a list of a status word (OK, or a refusal) and fields. Nothing is retried here: see
`buffer.redis.store`. A durable call waits for the server's disk and for replicas (I6). WAIT and
WAITAOF count the writes of their own connection, and a repeated call may have made none, so a write
of their own precedes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from redis.exceptions import NoPermissionError, NoScriptError, ResponseError

from buffer.errors import Fenced, LostRun, RoleHeld, RunDamaged, ScriptError
from buffer.redis.connection.bulk_io import Command, pipelined, send
from buffer.redis.connection.retry import NotDurable, WrongType
from buffer.redis.connection_errors import is_acl_failure, is_missing_command
from buffer.redis.key_fields import HINT
from buffer.redis.keys import clock_beside, sync_beside, type_below
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
        # WAIT and not WAITAOF for replicas: they report their disks only once a second (measured:
        # 0.5 s a call)
        disk = [("WAITAOF", 1, 0, WAIT_MS)] if self.disk else []
        return [("EVALSHA", sync, 1, clock_beside(key)), ("WAIT", self.replicas, WAIT_MS), *disk]

    def behind_payloads(self, key: str) -> list[Command]:
        """Return commands to follow writes of payloads on one node, which has its own replicas."""
        return [("SET", sync_beside(key), 1, "PX", 1), ("WAIT", self.replicas, WAIT_MS)]

    def check(self, answers: Sequence[Any]) -> None:
        """Raise NotDurable if the answers to these commands show that something is missing."""
        _, replicas, *disks = answers
        if [on_disk for on_disk, _ in disks] == [0]:
            raise NotDurable(f"not on the server's disk after {WAIT_MS} ms")
        if replicas < self.replicas:
            raise NotDurable(
                f"only {replicas} of {self.replicas} replicas have it after {WAIT_MS} ms"
            )


T = TypeVar("T")

_LARGE_BYTES = 32 * 2**10
"""A server reads a value of this size by itself, and smaller ones together."""


_TOGETHER = 8  # payloads after which their scripts are called


class ScriptCall(NamedTuple):
    """Keys and arguments of a script by the names in its header; see `Script.arrange`."""

    keys: KeysByName
    args: Mapping[str, Arg]
    tail_keys: Sequence[str | KeysByName] = ()
    tail_args: Sequence[Arg] = ()


Upload = tuple[Sequence[Command], ScriptCall]
"""The commands that store a payload, and the call of the script that accepts it."""


@dataclass(frozen=True, slots=True)
class ScriptRunner:
    """Runs scripts of a library through one client. Strings in replies are decoded.

    Raises ScriptError where a script refused its keys or arguments, RunDamaged where it cannot read
    what it finds, and redis.RedisError.
    """

    client: Any
    scripts: Mapping[str, Script]
    durability: Durability

    def call(self, script: Script, command: Command, *, durable: bool = False) -> list[Any]:
        """Run one call of a script (see `command_of`); a durable one returns once it is safe."""
        waits = self._waits(str(command[FIRST_KEY])) if durable else []

        def attempt() -> list[Any]:
            if waits:
                return pipelined(self.client, [command, *waits])
            return [self.client.execute_command(*command)]

        reply, *waited = self._run(script, [command], attempt)
        self._check(waited)
        return _decoded(reply)

    def call_and_read(
        self, script: Script, command: Command, read: Command
    ) -> tuple[list[Any], Any]:
        """Run one call of a script, then a command that reads, in one round trip."""
        reply, answer = self._run(
            script, [command], lambda: pipelined(self.client, [command, read])
        )
        return _decoded(reply), answer

    def call_many(self, script: Script, commands: Sequence[Command]) -> list[list[Any]]:
        replies = self._run(script, commands, lambda: pipelined(self.client, commands))
        return [_decoded(reply) for reply in replies]

    def upload(self, script: Script, key: str, uploads: Iterable[Upload]) -> list[list[Any]]:
        """Store payloads and call a script for each, durably, in one round trip.

        A payload is stored before its script runs. Later uploads may be made while earlier ones are
        sent. `key` is any key of the run.
        """
        waits = self._waits(key)
        sent: list[Command] = []

        def commands() -> Iterator[Command]:
            sent.clear()
            for command in _in_order(script, uploads):
                sent.append(command)
                yield command
            if sent:
                yield from waits

        answers = self._run(script, sent, lambda: send(self.client, commands()))
        self._check(answers[len(sent) :])
        replies = zip(sent, answers, strict=False)
        return [_decoded(reply) for command, reply in replies if command[1] == script.sha]

    def _run(
        self, script: Script, calls: Sequence[Command], attempt: Callable[[], list[T]]
    ) -> list[T]:
        """Return the answers to an attempt; load the scripts for it if the server lacks them."""
        try:
            try:
                return attempt()
            except NoScriptError as error:
                self._load(error)
                return attempt()
        except ResponseError as error:
            raise self._explain(script, _keys(calls), error) from error

    def _load(self, missing: NoScriptError) -> None:
        """Load missing scripts. Raises `missing`, which is transient, for users who may not."""
        scripts = self.scripts.values()
        try:
            # after a restart, a whole fleet finds that they are gone: most of it sends no source
            known = self.client.script_exists(*(script.sha for script in scripts))
            lacks = [
                script for script, is_known in zip(scripts, known, strict=True) if not is_known
            ]
            pipelined(self.client, [("SCRIPT LOAD", script.source) for script in lacks])
        except NoPermissionError:
            raise missing from None

    def _waits(self, key: str) -> list[Command]:
        if not self.durability.must_wait:
            return []
        return self.durability.behind_script(self.scripts["sync"].sha, key)

    def _check(self, waited: Sequence[Any]) -> None:
        if waited:
            self.durability.check(waited)

    def _explain(self, script: Script, keys: Sequence[str], error: ResponseError) -> Exception:
        text = str(error)
        if text.startswith("RMQ_ARG "):
            return ScriptError(f"{text.removeprefix('RMQ_ARG ')}; nothing was changed")
        if isinstance(error, WrongType) or not text.startswith("WRONGTYPE"):
            # a script failed on a field that is missing, or that is no number; refusals, full
            # memory, and the key of a command beside the script are for the caller
            is_damage = type(error) is ResponseError and "user_script" in text
            if is_damage and not (is_acl_failure(text) or is_missing_command(text)):
                return RunDamaged(f"{script.name}: {text[:300]}", hint=HINT)
            return error
        wrong = ", ".join(self._of_another_type(script, keys)[:3]) or "a key is of another type"
        return RunDamaged(f"{script.name}: {wrong}", hint=HINT)

    def _of_another_type(self, script: Script, keys: Sequence[str]) -> list[str]:
        """Return the keys of another type: of those named, or else below the prefixes; O(all keys).

        The process then ends. Users who may not search get [].
        """
        types = [script.header.type_of(position) for position in range(1, len(keys) + 1)]
        named = [(key, kind) for key, kind in zip(keys, types, strict=True) if kind != "PREFIX"]
        if wrong := self._differing(named):
            return wrong
        prefixes = [key for key, kind in zip(keys, types, strict=True) if kind == "PREFIX"]
        with suppress(NoPermissionError):
            return self._differing(
                [
                    (key.decode(), type_below(prefix))
                    for prefix in prefixes
                    for key in self.client.scan_iter(match=f"{prefix}*", count=1000)
                ]
            )
        return []

    def _differing(self, expected: Sequence[tuple[str, str]]) -> list[str]:
        kinds = pipelined(self.client, [("TYPE", key) for key, _ in expected])
        return [
            f"{key} is a {kind.decode()}, and not a {wanted.lower()}"
            for (key, wanted), kind in zip(expected, kinds, strict=True)
            if kind.decode().upper() not in (wanted, "NONE")
        ]


FIRST_KEY = 3  # its position in EVALSHA sha count key …


def command_of(script: Script, call: ScriptCall) -> Command:
    """Return the command for a call. Raises ScriptError where its names are not the header's."""
    keys, args = script.arrange(*call)
    return ("EVALSHA", script.sha, len(keys), *keys, *args)


def _in_order(script: Script, uploads: Iterable[Upload]) -> Iterator[Command]:
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
        later.append(command_of(script, call))
        if number % _TOGETHER == 0:
            yield from later
            later = []
    yield from later


def _keys(calls: Sequence[Command]) -> list[str]:
    """Return the keys of the last call; a wrong type under one of them is usually in all calls."""
    if not calls:
        return []
    count = int(str(calls[-1][FIRST_KEY - 1]))
    return [str(key) for key in calls[-1][FIRST_KEY : FIRST_KEY + count]]


def _is_large(command: Command) -> bool:
    value = command[2]  # of SET
    return isinstance(value, list) and sum(map(len, value)) >= _LARGE_BYTES


def _decoded(reply: Sequence[Any]) -> list[Any]:
    return [item.decode() if isinstance(item, bytes) else item for item in reply]
