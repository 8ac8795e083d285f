"""The connection to the server: who retries what, and how a script is called.

The client library's own retries are off (they would run a script again whose reply was lost).
`Store` retries by itself, with full jitter and a deadline, and only operations that are harmless
when repeated: every script has a natural key (I13), and payload keys are written once under a token
of their own. Where a key lies is `buffer.store.nodes`' business.

A payload must be stored before the script that pins it runs. `upload_and_call` sends both on one
connection, in one round trip.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import redis
from redis.exceptions import NoScriptError, OutOfMemoryError, ResponseError

from buffer.errors import ScriptError, StoreError, StoreFull, StoreUnavailable
from buffer.store.bulk_io import Asked, Command, Parts, pipelined, receive, send
from buffer.store.durability import Durability
from buffer.store.nodes import Role, Servers
from buffer.store.retry import CHANCE, OutageLog, is_passing
from buffer.store.scripts import Arg, KeysByName, Script, library
from buffer.store.url import SOCKET_TIMEOUT_S, mask_url


class ScriptCall(NamedTuple):
    """What `Store.call` takes."""

    keys: KeysByName
    args: Mapping[str, Arg]
    tail_keys: Sequence[str | KeysByName]
    tail_args: Sequence[Arg]


_LARGE_BYTES = 32 * 2**10
"""A server takes such a value in by itself, and what is smaller together with what comes next."""

Upload = tuple[Sequence[Command], ScriptCall]
"""The commands that store a payload, and the script call for it."""


T = TypeVar("T")


def _is_small(command: Command) -> bool:
    return not any(isinstance(part, memoryview) and len(part) >= _LARGE_BYTES for part in command)


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
        """Run a script by name; the reply's strings are decoded. Retried until the deadline (I13).

        `keys`: those that the script's header names, as `Keys.slots` finds them. `tail_keys`: see
        `Script.arrange`.

        A script that starts work is not waited for on a full server: StoreFull at once, so that the
        caller can do what frees memory.

        With `durable`, the answer is given once the change is on the server's disk, and on as many
        replicas as `wait_replicas` says (I6). Too few of them are a server that is away: waited
        for, then StoreUnavailable.
        """
        entry = self.scripts[script]
        all_keys, all_args = entry.arrange(keys, args, tail_keys, tail_args)
        wait = durable and self.durability.must_wait

        def run() -> list[Any]:
            try:
                return self._run(entry, all_keys, all_args, wait)
            except ResponseError as error:
                raise self.explain(entry, all_keys, error) from error

        reply = self.retrying(script, run, starts_work=entry.starts_work)
        return [item.decode() if isinstance(item, bytes) else item for item in reply]

    def call_many(
        self, script: str, calls: Iterable[tuple[KeysByName, Mapping[str, Arg]]]
    ) -> list[list[Any]]:
        """Run a script that changes nothing once for each (keys, args), in one round trip.

        Each call is of one instant; between two of them others may move.
        """
        entry = self.scripts[script]
        sha = entry.sha
        arranged = [entry.arrange(*call) for call in calls]

        def run() -> list[list[Any]]:
            pipe = self.control.pipeline(transaction=False)
            for place, (keys, args) in enumerate(arranged):
                # the first brings the text, so that no hash behind it can be unknown
                verb, text = ("EVALSHA", sha) if place else ("EVAL", entry.source)
                pipe.execute_command(verb, text, len(keys), *keys, *args)
            return list(pipe.execute())

        replies = self.retrying(script, run) if arranged else []
        return [
            [item.decode() if isinstance(item, bytes) else item for item in reply]
            for reply in replies
        ]

    def _run(self, entry: Script, keys: list[str], args: list[Arg], wait: bool) -> list[Any]:
        try:
            return self._evaluate("EVALSHA", entry, keys, args, wait)
        except NoScriptError:
            return self._evaluate("EVAL", entry, keys, args, wait)

    def explain(self, entry: Script, keys: Sequence[str], error: ResponseError) -> Exception:
        """What is raised for a script that failed: ScriptError where it refused keys or arguments."""
        said = str(error)
        if said.startswith("RMQ_ARG "):
            return ScriptError(f"{said.removeprefix('RMQ_ARG ')}; nothing was changed")
        if not said.startswith("WRONGTYPE"):
            return error
        kinds = [kind.decode() for kind in self.each("types", [("TYPE", key) for key in keys])]
        wants = [entry.header.type_of(place) for place in range(1, len(keys) + 1)]
        found = zip(keys, kinds, wants, strict=True)
        wrong = [
            f"{key} is a {kind}" for key, kind, want in found if kind.upper() not in (want, "NONE")
        ]
        return ScriptError(
            f"{entry.name}: {', '.join(wrong) or 'a record'}, and not what buffer/store/keys.py says",
            hint="something else wrote to the keys of this run",
        )

    def _evaluate(
        self, verb: str, script: Script, keys: list[str], args: list[Arg], wait: bool
    ) -> list[Any]:
        client = self.servers.client("control", keys[0])
        call = (verb, script.text(verb), len(keys), *keys, *args)
        if not wait:
            return list(client.execute_command(*call))
        waits = self.durability.behind_script(verb, self.scripts["sync"].text(verb), keys[0])
        reply, *waited = pipelined(client, [call, *waits])
        self.durability.check(waited)
        return list(reply)

    @property
    def durability(self) -> Durability:
        """What a durable call waits for."""
        return Durability(self.wait_replicas, self.waits_for_disk)

    def upload_and_call(self, script: str, key: str, uploads: Sequence[Upload]) -> list[list[Any]]:
        """Upload payloads and call a script for each of them, in one round trip; return its replies
        as of a durable `call`.

        All keys of the script lie where `key` does. In a cluster, payloads do not: they go to their
        nodes first. What was carried out before the server went away is repeated (I13).
        """
        if not uploads:
            return []
        payloads = [command for commands, _ in uploads for command in commands]
        if self.in_cluster:
            self.write("payload write", payloads)
            payloads = []
        # the server takes in large values one by one, small ones together with what follows them: it
        # then writes to disk once for all of the small ones and the scripts
        payloads.sort(key=_is_small)
        entry = self.scripts[script]
        calls = [entry.arrange(*call) for _, call in uploads]

        def run() -> list[list[Any]]:
            try:
                return self._run_uploads(entry, key, payloads, calls)
            except ResponseError as error:
                raise self.explain(entry, calls[-1][0], error) from error

        replies = self.retrying(script, run, starts_work=entry.starts_work)
        return [
            [item.decode() if isinstance(item, bytes) else item for item in reply]
            for reply in replies
        ]

    def _run_uploads(
        self,
        entry: Script,
        key: str,
        payloads: Sequence[Command],
        calls: Sequence[tuple[list[str], list[Arg]]],
    ) -> list[list[Any]]:
        """Return the replies of the script, once all of it is durable."""
        client = self.servers.client("bulk", key)
        sync = self.scripts["sync"]
        durability = self.durability
        commands: list[Command] = [*payloads]
        commands += [("EVALSHA", entry.sha, len(keys), *keys, *args) for keys, args in calls]
        if durability.must_wait:
            commands += durability.behind_script("EVALSHA", sync.sha, key)
        try:
            answers = send(client, commands)
        except NoScriptError:
            for unknown in (entry, sync):
                client.script_load(unknown.source)
            answers = send(client, commands)
        replies = answers[len(payloads) :]
        if durability.must_wait:
            durability.check(replies[len(calls) :])
        return replies[: len(calls)]

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
        self, what: str, names: Sequence[Sequence[str]], sizes: Sequence[int], asked: Asked = bool
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
        if not is_passing(error):
            raise StoreError(f"{what}: the server refused: {error}") from error
        left = end - time.monotonic()
        if left <= 0 and (isinstance(error, OutOfMemoryError) or not self.patience()):
            raise self._given_up(what, error) from error
        self._outages.failed(what, error)
        self.retries += 1
        self.servers.look_again()
        pause = CHANCE.uniform(0.0, min(2.0, 0.05 * 2.0 ** min(attempt, 10)))
        time.sleep(min(left, pause) if left > 0 else pause)

    def _given_up(self, what: str, error: redis.RedisError) -> StoreUnavailable:
        if isinstance(error, OutOfMemoryError):
            hint = "what is trained and committed frees some; raise maxmemory, or lower [memory] budget_bytes"
            return StoreFull(f"{what}: the memory of {mask_url(self.url)} is full", hint=hint)
        hint = "is the server running? everything continues by itself once it is back"
        return StoreUnavailable(
            f"{what}: no usable answer from {mask_url(self.url)}: {error}", hint=hint
        )
