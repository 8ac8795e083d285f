"""The connection to the server: one process's view of a server or cluster, with all retries.

The client library's own retries are off, since they would run a script again whose reply was lost.
`Store` repeats only harmless operations, with full jitter and a deadline: every script has a
natural key (I13), and payload keys are written once under a token of their own.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import redis
from redis.exceptions import NoScriptError, OutOfMemoryError

from buffer.errors import LostRun, RunDamaged
from buffer.limits import RunLimits
from buffer.observers import Observer
from buffer.redis.bulk_io import Command, Parts, receive, send
from buffer.redis.errors import describe_connection_error, given_up, refusal
from buffer.redis.eviction import Eviction
from buffer.redis.key_fields import HINT
from buffer.redis.keys import Keys, SlotKeys, control_beside
from buffer.redis.retry import Backoff, OutageLog, is_transient
from buffer.redis.scripts import (
    Arg,
    KeysByName,
    Script,
    ScriptCall,
    TailArg,
    check_durable,
    library,
    load_missing,
    waits_behind_script,
)
from buffer.redis.url import SOCKET_TIMEOUT_S, Servers

T = TypeVar("T")

_LOSSES = ("FENCED", "LOST", "NO_RUN", "DAMAGED", "EMPTY")
"""Replies to a process that no longer knows the state of its run."""


class Store:
    """Connects one process to a server or a cluster, and retries what it asks. Thread-safe.

    Five ways to ask: `call` a script, `send` commands, `read` payloads, `ask` one small thing, and
    `wait` for a wake-up. After `deadline_s`, each raises StoreUnavailable. In a cluster, `client`
    is that of the node that holds the run of `at`. Get it anew in every attempt: a run may move.
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
    def client(self) -> Any:
        """Return the client library's own client, for use inside `retrying`."""
        return self.servers.client(self._home)

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
        """Run a script by name, and return its decoded reply; see `send`.

        `keys` are those that the script's header names, as `Keys.slots` finds them; `tail_keys`:
        see `Script.command`.
        """
        call = ScriptCall(script, keys, args, tail_keys, tail_args)
        starts_work = self.scripts[script].starts_work
        (reply,) = self.send(script, [call], durable=durable, starts_work=starts_work)
        return cast(list[Any], reply)

    def send(
        self,
        what: str,
        commands: Sequence[Command | ScriptCall],
        *,
        durable: bool = False,
        starts_work: bool = False,
    ) -> list[Any]:
        """Run commands and scripts on keys of one run in one round trip; return their answers.

        All are repeated until the deadline: each must be harmless when it runs again (I13). Values
        are sent without a copy. A durable call is answered once the changes are on the server's
        disk and on `wait_replicas` replicas (I6); with fewer replicas, it waits and raises
        StoreUnavailable at the deadline. `starts_work`: raises StoreFull at once on a full server,
        so that the caller can free memory.
        """
        if not commands:
            return []
        sent = [
            self.scripts[each.script].command(*each[1:]) if isinstance(each, ScriptCall) else each
            for each in commands
        ]
        # of EVALSHA sha count key …, or of a command with a key
        at = 3 if isinstance(commands[0], ScriptCall) else 1
        key = self._home or str(sent[0][at] if len(sent[0]) > at else "")
        waits = durable and (self.waits_for_disk or self.wait_replicas > 0)
        if waits:
            sync = self.scripts["sync"]
            sent += waits_behind_script(self.wait_replicas, self.waits_for_disk, sync, key)

        def attempt() -> list[Any]:
            client = self.servers.client(key)
            try:
                answers = send(client, sent)
            except NoScriptError as error:
                load_missing(client, self.scripts.values(), error)
                answers = send(client, sent)
            if waits:
                check_durable(self.wait_replicas, answers[len(commands) :])
            return answers[: len(commands)]

        try:
            answers = self.retrying(what, attempt, starts_work=starts_work)
        except LostRun:
            self._explain_loss(control_beside(key))
            raise
        return [
            self._decoded(each, answer) if isinstance(each, ScriptCall) else answer
            for each, answer in zip(commands, answers, strict=True)
        ]

    def _decoded(self, call: ScriptCall, reply: Sequence[Any]) -> list[Any]:
        found = [
            item.decode(errors="replace") if isinstance(item, bytes) else item for item in reply
        ]
        if found[0] in _LOSSES and isinstance(call.keys, SlotKeys):
            self._explain_loss(call.keys["control"])
        return found

    def _explain_loss(self, control: str) -> None:
        """Raise StoreUnsafe where a process is refused because the server evicted its run."""
        found = self.eviction()
        if found.keys and not self.ask("run", "EXISTS", control):
            raise found.error()

    def eviction(self) -> Eviction:
        """Return whether the servers delete keys when they are full, and how many they deleted."""
        return self.retrying(
            "eviction", lambda: Eviction.read([client for _, client in self.servers.masters()])
        )

    def read(
        self, what: str, entries: Sequence[tuple[Sequence[str], int]], *, own_pages: bool = False
    ) -> list[Parts]:
        """Return the values of several keys for each entry; see `bulk_io.receive`."""
        if not entries:
            return []
        home = self._home or entries[0][0][0]
        return self.retrying(
            what, lambda: receive(self.servers.client(home), entries, own_pages=own_pages)
        )

    def ask(self, what: str, *command: str | int) -> Any:
        """Return the answer to one small command; see `send`."""
        try:
            return self.send(what, [command])[0]
        except RunDamaged as error:
            raise RunDamaged(f"{what}: {command[1]} is of another type", hint=HINT) from error

    def wait(self, bell: str, timeout_s: float, *, shared: bool = False) -> bool:
        """Block until a wake-up arrives in the list `bell`, and return whether one did.

        The list is cleared before the caller polls, so a later wake-up is never lost; a lost one
        costs one time-out. In a `shared` list, each wake-up is for one waiting client, and the
        others stay.
        """

        def block() -> bool:
            client = self.servers.client(bell)
            # 0 would block for ever; a time near the socket's own time-out would raise
            bounded_s = min(max(timeout_s, 0.01), SOCKET_TIMEOUT_S / 3)
            arrived = client.blpop([bell], timeout=bounded_s)
            if arrived and not shared:
                client.delete(bell)
            return bool(arrived)

        return self.retrying("bell", block)

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
        is_over = left_s <= 0 and (isinstance(error, OutOfMemoryError) or not self.patience())
        # after `close`, another attempt would open a connection that nobody closes
        if is_over or self.servers.is_closed:
            raise given_up(self.url, what, error) from error
        cause = describe_connection_error(self.url, error).message
        self._outages.failed(what, cause, is_full=isinstance(error, OutOfMemoryError))
        self.retries += 1
        self.servers.forget_slots()  # an error may mean that the key has moved to another node
        pause_s = Backoff(0.05, 2.0).pause_s(attempt)
        time.sleep(min(left_s, pause_s) if left_s > 0 else pause_s)


class RunContext(NamedTuple):
    """What each part of a run works with. All share the limits, which `adopt` changes in place.

    `observers`: receive what this process does with groups of training.
    """

    store: Store
    keys: Keys
    limits: RunLimits
    observers: Sequence[Observer] = ()
