"""The connection to the server: one process's view of a server or cluster, with all retries.

The client library's own retries are off, since they would run a script again whose reply was lost.
`Store` repeats only harmless operations, with full jitter and a deadline: every script has a
natural key (I13), and payload keys are written once under a token of their own.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import redis
from redis.exceptions import NoScriptError, OutOfMemoryError

from buffer.errors import (
    LostRun,
    RunDamaged,
)
from buffer.limits import RunLimits
from buffer.observers import Observer
from buffer.redis.connection.bulk_io import Command, Parts, pipelined, receive, send
from buffer.redis.connection.nodes import Role, Servers
from buffer.redis.connection.retry import Backoff, OutageLog, is_transient
from buffer.redis.connection.url import SOCKET_TIMEOUT_S
from buffer.redis.connection_errors import describe_connection_error, given_up, refusal
from buffer.redis.eviction import Eviction
from buffer.redis.key_fields import HINT
from buffer.redis.keys import Keys, SlotKeys, control_beside
from buffer.redis.scripts import (
    Arg,
    KeysByName,
    Script,
    ScriptCall,
    TailArg,
    Upload,
    check_durable,
    decoded,
    in_order,
    library,
    load_missing,
    waits_behind_script,
)

T = TypeVar("T")

_BACKOFF = Backoff(0.05, 2.0)

FIRST_KEY = 3  # its position in EVALSHA sha count key …

_LOSSES = ("FENCED", "LOST", "NO_RUN", "DAMAGED", "EMPTY")
"""Replies to a process that no longer knows the state of its run."""


class Store:
    """Connects one process to a server or a cluster, and retries what it asks. Thread-safe.

    After `deadline_s`, an operation raises StoreUnavailable. In a cluster, `control` and `bulk` are
    clients of the node that holds the run of `at`. Get them anew in every attempt: a run may move.
    """

    def __init__(self, url: str, *, name: str = "rolloutmq", deadline_s: float = 60.0) -> None:
        self.url = url
        self.name = name
        self.deadline_s = deadline_s
        self.servers = Servers(url, name)
        self.scripts: Mapping[str, Script] = library()  # by name; a test may replace some
        self.waits_for_disk = False
        self.wait_replicas = 0
        self.allow_unsafe = False  # the user accepts that this server may lose data
        self.retries = 0
        self.patience: Callable[[], bool] = lambda: False
        """whether to continue after the deadline, as the holder of a role does until stopped"""
        self.watchers: list[Callable[[str, float, int], object]] = []
        """called for every answered operation with its name, its seconds, and its repetitions"""
        self._outages = OutageLog()
        self._home = ""

    def at(self, key: str, wait_replicas: int = 0) -> Store:
        """Return a view of this store for the run of `key`; the store itself if that is the same.

        In a cluster, all its commands go to the node of `key`. Its durable calls wait for
        `wait_replicas` replicas.
        """
        in_cluster = self.retrying("first contact", lambda: self.servers.is_cluster)
        if not in_cluster and wait_replicas == self.wait_replicas:
            return self
        there = copy.copy(self)
        there._home = key
        there.wait_replicas = wait_replicas
        return there

    @property
    def control(self) -> Any:
        """Return the client for small commands."""
        return self.servers.client("control", self._home)

    @property
    def bulk(self) -> Any:
        """Return the client for payloads and long lists."""
        return self.servers.client("bulk", self._home)

    def close(self) -> None:
        self.servers.close()

    def call(
        self,
        script: str,
        keys: KeysByName,
        args: Mapping[str, Arg],
        tail_keys: Sequence[str | KeysByName] = (),
        tail_args: Sequence[TailArg] = (),
        *,
        durable: bool = False,
    ) -> list[Any]:
        """Run a script by name, repeated until the deadline (I13), and return its decoded reply.

        `keys` are those that the script's header names, as `Keys.slots` finds them; `tail_keys`:
        see `Script.command`. A durable call is answered once the change is on the server's disk and
        on `wait_replicas` replicas (I6); with fewer replicas, it waits and raises StoreUnavailable
        at the deadline. Raises StoreFull at once for a script that starts work on a full server, so
        that the caller can free memory.
        """
        entry = self.scripts[script]
        command = entry.command(keys, args, tail_keys, tail_args)
        key = str(command[FIRST_KEY])
        waits = self._waits(key) if durable else []

        def attempt(client: Any) -> list[Any]:
            if not waits:
                return [client.execute_command(*command)]
            answers = pipelined(client, [command, *waits])
            check_durable(self.wait_replicas, answers[1:])
            return answers

        reply = decoded(self._run(entry, "control", key, attempt)[0])
        if reply[0] in _LOSSES and isinstance(keys, SlotKeys):
            self._explain_loss(keys["control"])
        return reply

    def _explain_loss(self, control: str) -> None:
        """Raise StoreUnsafe where a process is refused because the server evicted its run."""
        found = self.eviction()
        if found.keys and not self.ask("run", "EXISTS", control):
            raise found.error()

    def eviction(self) -> Eviction:
        """Return whether the servers delete keys when they are full, and how many they deleted."""
        return self.retrying(
            "eviction",
            lambda: Eviction.read([client for _, client in self.servers.masters()]),
        )

    def call_and_read(
        self,
        script: str,
        keys: KeysByName,
        args: Mapping[str, Arg],
        tail_args: Sequence[Arg],
        read: Command,
    ) -> tuple[list[Any], Any]:
        """Run a script as `call` does, then a read in its slot; return the reply and the answer."""
        entry = self.scripts[script]
        command = entry.command(keys, args, (), tail_args)
        both = partial(pipelined, commands=[command, read])
        reply, answer = self._run(entry, "control", str(command[FIRST_KEY]), both)
        return decoded(reply), answer

    def call_many(self, script: str, calls: Iterable[ScriptCall]) -> list[list[Any]]:
        """Make several calls of a read-only script in one round trip, each at one instant."""
        entry = self.scripts[script]
        commands = [entry.command(*call) for call in calls]
        if not commands:
            return []
        all_of_them = partial(pipelined, commands=commands)
        return [decoded(reply) for reply in self._run(entry, "control", self._home, all_of_them)]

    def upload_and_call(self, script: str, key: str, uploads: Iterable[Upload]) -> list[list[Any]]:
        """Store payloads and make their calls in one round trip, as a durable `call` does.

        A repeated attempt is harmless (I13); it iterates over `uploads` again. Later uploads may be
        made while earlier ones are sent.
        """
        entry = self.scripts[script]
        waits = self._waits(key)

        def attempt(client: Any) -> list[Any]:
            sent: list[Command] = []

            def commands() -> Iterator[Command]:
                for command in in_order(entry, uploads):
                    sent.append(command)
                    yield command
                yield from waits if sent else ()

            answers = send(client, commands())
            check_durable(self.wait_replicas, answers[len(sent) :])
            return [
                decoded(reply)
                for command, reply in zip(sent, answers, strict=False)
                if command[1] == entry.sha
            ]

        return self._run(entry, "bulk", key, attempt)

    def _waits(self, key: str) -> list[Command]:
        sync = self.scripts["sync"]
        return waits_behind_script(self.wait_replicas, self.waits_for_disk, sync, key)

    def _run(
        self, script: Script, role: Role, key: str, attempt: Callable[[Any], list[T]]
    ) -> list[T]:
        """Return the answers to `attempt`, repeated until the deadline, at the server of `key`."""

        def run() -> list[T]:
            client = self.servers.client(role, key)
            try:
                return attempt(client)
            except NoScriptError as error:
                load_missing(client, self.scripts.values(), error)
                return attempt(client)

        try:
            return self.retrying(script.name, run, starts_work=script.starts_work)
        except LostRun:
            self._explain_loss(control_beside(key))
            raise

    def each(self, what: str, commands: Sequence[Command], role: Role = "bulk") -> list[Any]:
        """Run commands on keys of one run in one round trip; return their answers in order."""
        return self._send(what, commands, pipelined, role=role)

    def sizes(self, what: str, keys: Sequence[str]) -> list[int]:
        """Return the bytes of each value, 0 for a missing one, as `each` does, but faster."""
        return self._send(what, [("STRLEN", key) for key in keys], send)

    def write(
        self, what: str, commands: Sequence[Command], *, starts_work: bool = False
    ) -> list[Any]:
        """Run commands with large values as `each` does, without copies of the values.

        `starts_work`: StoreFull at once on a full server, as in `call`.
        """
        return self._send(what, commands, send, starts_work=starts_work)

    def read(
        self, what: str, entries: Sequence[tuple[Sequence[str], int]], *, own_pages: bool = False
    ) -> list[Parts]:
        """Return the values of several keys for each entry; see `bulk_io.receive`."""
        run = partial(receive, own_pages=own_pages)
        home = self._home or (entries[0][0][0] if entries else "")
        return self.retrying(what, lambda: run(self.servers.client("bulk", home), entries))

    def _send(
        self,
        what: str,
        commands: Sequence[Command],
        run: Callable[[Any, Sequence[Command]], list[Any]],
        *,
        role: Role = "bulk",
        starts_work: bool = False,
    ) -> list[Any]:
        if not commands:
            return []
        home = self._home or str(commands[0][1])
        return self.retrying(
            what, lambda: run(self.servers.client(role, home), commands), starts_work=starts_work
        )

    def wait_for_wake_up(self, bell: str, timeout_s: float, *, shared: bool = False) -> bool:
        """Block until a wake-up arrives in the list `bell`, and return whether one did.

        The list is cleared before the caller polls, so a later wake-up is never lost; a lost one
        costs one time-out. In a `shared` list, each wake-up is for one waiting client, and the
        others stay.
        """

        def block() -> bool:
            client = self.servers.client("bells", bell)
            # 0 would block for ever; a time near the socket's own time-out would raise
            bounded_s = min(max(timeout_s, 0.01), SOCKET_TIMEOUT_S / 3)
            arrived = client.blpop([bell], timeout=bounded_s)
            if arrived and not shared:
                client.delete(bell)
            return bool(arrived)

        return self.retrying("bell", block)

    def ask(self, what: str, *command: str | int) -> Any:
        """Return the answer to one small command; see `retrying`."""
        try:
            return self.retrying(what, lambda: self.control.execute_command(*command))
        except RunDamaged as error:
            raise RunDamaged(f"{what}: {command[1]} is of another type", hint=HINT) from error

    def retrying(
        self,
        what: str,
        operation: Callable[[], T],
        *,
        deadline_s: float | None = None,
        starts_work: bool = False,
    ) -> T:
        """Return the result of `operation`, which is repeated after transient errors.

        `what` names it in logs and errors. Raises StoreUnavailable after `deadline_s` (or the
        store's own) unless `patience` asks for more, StoreFull where memory is full, RunDamaged for
        a key of another type, StoreError for another error that is not transient.
        """
        started_s = time.monotonic()
        end_s = started_s + (self.deadline_s if deadline_s is None else deadline_s)
        attempt = 0
        while True:
            try:
                result = operation()
                break
            except redis.RedisError as error:
                # new work is not worth waiting for: the caller first frees what it can
                is_refused = starts_work and isinstance(error, OutOfMemoryError)
                self._pause(what, error, attempt, 0.0 if is_refused else end_s)
                attempt += 1
        self._outages.worked(what)
        for watch in self.watchers:
            watch(what, time.monotonic() - started_s, attempt)
        return result

    def _pause(self, what: str, error: redis.RedisError, attempt: int, end_s: float) -> None:
        """Wait before the next attempt, or raise the reason for having none."""
        if not is_transient(error):
            raise refusal(self.url, what, error) from error
        left_s = end_s - time.monotonic()
        if left_s <= 0 and (isinstance(error, OutOfMemoryError) or not self.patience()):
            raise given_up(self.url, what, error) from error
        cause = describe_connection_error(self.url, error).message
        self._outages.failed(what, cause, is_full=isinstance(error, OutOfMemoryError))
        self.retries += 1
        self.servers.forget_slots()  # an error may mean that the key has moved to another node
        pause_s = _BACKOFF.pause_s(attempt)
        time.sleep(min(left_s, pause_s) if left_s > 0 else pause_s)


class RunContext(NamedTuple):
    """What each part of a run works with. All share the limits, which `adopt` changes in place.

    `observers`: receive what this process does with groups of training.
    """

    store: Store
    keys: Keys
    limits: RunLimits
    observers: Sequence[Observer] = ()
