"""The connection to the server: one process's view of a server or cluster, with all retries.

The client library's own retries are off (they would run a script again whose reply was lost).
`Store` retries by itself, with full jitter and a deadline, and only operations that are harmless
when repeated: every script has a natural key (I13), and payload keys are written once under a token
of their own. `buffer.store.nodes` knows which server holds a key.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from threading import Event
from typing import Any, TypeVar

import redis
from redis.exceptions import OutOfMemoryError

from buffer.errors import StoreError, StoreFull, StoreUnavailable
from buffer.store.bulk_io import Command, Parts, pipelined, receive, send
from buffer.store.durability import Durability
from buffer.store.nodes import Role, Servers
from buffer.store.retry import Backoff, OutageLog, is_transient
from buffer.store.script_calls import FIRST_KEY, ScriptCall, ScriptRunner, Upload, command_of
from buffer.store.scripts import Arg, KeysByName, Script, library
from buffer.store.url import SOCKET_TIMEOUT_S, mask_url

T = TypeVar("T")

_BACKOFF = Backoff(0.05, 2.0)


class Replayed(Iterable[T]):
    """Items that are made when they are first needed, and kept for every later pass."""

    def __init__(self, items: Iterable[T]) -> None:
        self._source = iter(items)
        self._made: list[T] = []

    def __iter__(self) -> Iterator[T]:
        yield from self._made
        for item in self._source:
            self._made.append(item)
            yield item


class Store:
    """One server or cluster, seen by one process. Thread-safe.

    `deadline_s` bounds how long one operation is tried; `StoreUnavailable` says that it passed. In
    a cluster, `control` and `bulk` are clients of the node that holds the run which `at` was asked
    for: get them anew for every try.
    """

    def __init__(self, url: str, *, name: str = "rolloutmq", deadline_s: float = 60.0) -> None:
        self.url = url
        self.name = name
        self.deadline_s = deadline_s
        self.servers = Servers(url, name)
        self.scripts: Mapping[str, Script] = library()
        """by name; a test of the tests puts others here"""
        self.waits_for_disk = False
        self.wait_replicas = 0
        self.retries = 0
        self.patience: Callable[[], bool] = lambda: False
        """asked once the deadline has passed: whether to wait on, as who holds a role does until it
        is stopped
        """
        self.watchers: list[Callable[[str, float, int], object]] = []
        """hear of every call that was answered: its name, the seconds it took, how often it was
        repeated
        """
        self._outages = OutageLog()
        self._home = ""

    def at(self, key: str, wait_replicas: int = 0) -> Store:
        """This store, with `control` and `bulk` where `key` lies, and durable calls that wait for
        so many replicas.

        Itself where neither makes a difference.
        """
        in_cluster = self.retrying("first contact", lambda: self.servers.is_cluster)
        if not in_cluster and wait_replicas == self.wait_replicas:
            return self
        there = copy.copy(self)
        there._home = key
        there.wait_replicas = wait_replicas
        return there

    @property
    def in_cluster(self) -> bool:
        """Whether this is a view that `at` gave of a cluster."""
        return bool(self._home) and self.servers.is_cluster

    @property
    def control(self) -> Any:
        """For small commands."""
        return self.servers.client("control", self._home)

    @property
    def bulk(self) -> Any:
        """For payloads and long lists."""
        return self.servers.client("bulk", self._home)

    def close(self) -> None:
        self.servers.close()

    def call(
        self,
        script: str,
        keys: KeysByName,
        args: Mapping[str, Arg],
        tail_keys: Sequence[str | KeysByName] = (),
        tail_args: Sequence[Arg] = (),
        *,
        durable: bool = False,
    ) -> list[Any]:
        """Run a script by name and return its reply, with strings decoded.

        Repeated until the deadline (I13). `keys` are those that the script's header names, as
        `Keys.slots` finds them; `tail_keys`: see `Script.arrange`.

        A durable call is answered once the change is on the server's disk, and on as many replicas
        as `wait_replicas` says (I6). Fewer replicas count as a server that is unreachable: the call
        waits, and raises StoreUnavailable at the deadline.

        Raises StoreFull at once for a script that starts work on a full server, so that the caller
        can do what frees memory.
        """
        entry = self.scripts[script]
        call = ScriptCall(keys, args, tail_keys, tail_args)
        command = command_of(entry, call)
        return self.retrying(
            script,
            lambda: self._runner("control", str(command[FIRST_KEY])).call(
                entry, command, durable=durable
            ),
            starts_work=entry.starts_work,
        )

    def call_many(
        self, script: str, calls: Iterable[tuple[KeysByName, Mapping[str, Arg]]]
    ) -> list[list[Any]]:
        """Run a read-only script once for each (keys, args), in one round trip.

        Each call sees one instant; other clients may change the run between two of them.
        """
        entry = self.scripts[script]
        commands = [command_of(entry, ScriptCall(*call)) for call in calls]
        if not commands:
            return []
        return self.retrying(script, lambda: self._runner("control").call_many(entry, commands))

    def upload_and_call(self, script: str, key: str, uploads: Iterable[Upload]) -> list[list[Any]]:
        """Store payloads, call a script for each, and return the replies, as of a durable `call`.

        All of it is one round trip, and every key lies in the slot of `key`. In a cluster, payloads
        lie elsewhere: they are written to their nodes first. Uploads may be made on the way (see
        `ScriptRunner.upload`). A repeated attempt sends the same ones: repeated calls are harmless
        (I13).
        """
        entry = self.scripts[script]
        uploads = Replayed(uploads)
        if self.in_cluster:
            self.write("payload write", [command for payload, _ in uploads for command in payload])
            uploads = [((), call) for _, call in uploads]
        return self.retrying(
            script,
            lambda: self._runner("bulk", key).upload(entry, key, uploads),
            starts_work=entry.starts_work,
        )

    @property
    def durability(self) -> Durability:
        """Return what a durable call waits for."""
        return Durability(self.wait_replicas, self.waits_for_disk)

    def _runner(self, role: Role, key: str = "") -> ScriptRunner:
        client = self.servers.client(role, key or self._home)
        return ScriptRunner(client, self.scripts, self.durability)

    def each(
        self,
        what: str,
        commands: Sequence[Command],
        role: Role = "bulk",
        *,
        on_payloads: bool = False,
    ) -> list[Any]:
        """Run commands, every one where its key lies: one pipeline per server. The answers, in
        order.

        `on_payloads`: they are writes, and waited for as in `write`.
        """

        def run(client: Any, here: list[int]) -> list[Any]:
            mine = [commands[place] for place in here]
            return (
                self._replicated(pipelined, client, mine)
                if on_payloads
                else pipelined(client, mine)
            )

        return self.retrying(
            what, lambda: self.servers.at_each(role, [str(command[1]) for command in commands], run)
        )

    def write(
        self, what: str, commands: Sequence[Command], *, starts_work: bool = False
    ) -> list[Any]:
        """`each` for large values, which are sent from where they are. `starts_work`: see `call`.

        In a cluster, payloads lie on other nodes than the script that accepts them, and
        `wait_replicas` are waited for here: those that the script waits for say nothing of these.
        """

        def run(client: Any, here: list[int]) -> list[Any]:
            return self._replicated(send, client, [commands[place] for place in here])

        keys = [str(command[1]) for command in commands]
        return self.retrying(
            what, lambda: self.servers.at_each("bulk", keys, run), starts_work=starts_work
        )

    def _replicated(
        self, run: Callable[[Any, list[Command]], list[Any]], client: Any, commands: list[Command]
    ) -> list[Any]:
        if not (self.wait_replicas and self.in_cluster):
            return run(client, commands)
        answers = run(client, [*commands, *self.durability.behind_payloads(str(commands[0][1]))])
        self.durability.check(answers[len(commands) :])
        return answers[: len(commands)]

    def read(
        self,
        what: str,
        names: Sequence[Sequence[str]],
        sizes: Sequence[int],
        asked: Event | None = None,
    ) -> list[Parts]:
        """The values of several keys of one slot each; see `buffer.store.bulk_io.receive`."""

        def run(client: Any, here: list[int]) -> list[Parts]:
            return receive(client, [names[n] for n in here], [sizes[n] for n in here], asked)

        return self.retrying(
            what, lambda: self.servers.at_each("bulk", [keys[0] for keys in names], run)
        )

    def wait_bell(self, bell: str, timeout_s: float, *, shared: bool = False) -> bool:
        """Block until `bell` rings or the time is up. Whether it rang; a lost ring costs one
        time-out.

        The bell is cleared before the caller looks at what it was rung for, so a later ring is
        never lost. Of a `shared` bell, every listener takes one ring.
        """

        def listen() -> bool:
            # never 0 (for ever), never near the socket's own time-out
            client = self.servers.client("bells", bell)
            rang = client.blpop([bell], timeout=min(max(timeout_s, 0.01), SOCKET_TIMEOUT_S / 3))
            if rang and not shared:
                client.delete(bell)
            return bool(rang)

        return self.retrying("bell", listen)

    def retrying(
        self,
        what: str,
        operation: Callable[[], T],
        *,
        deadline_s: float | None = None,
        starts_work: bool = False,
    ) -> T:
        """Run `operation`, again and again while the server is away, until it works or patience
        ends.
        """
        started = time.monotonic()
        attempt = 0
        end = started + (self.deadline_s if deadline_s is None else deadline_s)
        while True:
            try:
                result = operation()
                break
            except redis.RedisError as error:
                ends = 0.0 if starts_work and isinstance(error, OutOfMemoryError) else end
                self._wait(what, error, attempt, ends)
                attempt += 1
        self._outages.worked(what)
        for watch in self.watchers:
            watch(what, time.monotonic() - started, attempt)
        return result

    def _wait(self, what: str, error: redis.RedisError, attempt: int, end: float) -> None:
        if not is_transient(error):
            raise StoreError(f"{what}: the server refused: {error}") from error
        left = end - time.monotonic()
        if left <= 0 and (isinstance(error, OutOfMemoryError) or not self.patience()):
            raise self._given_up(what, error) from error
        self._outages.failed(what, error)
        self.retries += 1
        self.servers.look_again()
        pause = _BACKOFF.pause_s(attempt)
        time.sleep(min(left, pause) if left > 0 else pause)

    def _given_up(self, what: str, error: redis.RedisError) -> StoreUnavailable:
        if isinstance(error, OutOfMemoryError):
            hint = "what is trained and committed frees some; raise maxmemory, or lower [memory] budget_bytes"
            return StoreFull(f"{what}: the memory of {mask_url(self.url)} is full", hint=hint)
        hint = "is the server running? everything continues by itself once it is back"
        return StoreUnavailable(
            f"{what}: no usable answer from {mask_url(self.url)}: {error}", hint=hint
        )
