"""Payloads and the script calls that speak of them, in one round trip.

A payload must be stored before the script that pins it runs: on one connection it is. While the server takes one in,
the next is encoded, so a batch costs little more than its bytes. What is small comes behind all that is large: a server
that writes to disk before it answers would do that for each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from redis.exceptions import NoScriptError, ResponseError

from buffer.bulk import Command, send
from buffer.scripts import Arg, KeysByName, Script

if TYPE_CHECKING:
    from buffer.store import Store


class ScriptCall(NamedTuple):
    """What `Store.call` takes."""

    keys: KeysByName
    args: Mapping[str, Arg]
    tail_keys: Sequence[str | KeysByName]
    tail_args: Sequence[Arg]


_LARGE_BYTES = 32 * 2**10
"""A server takes such a value in by itself, and what is smaller together with what comes next."""

Upload = tuple[Sequence[Command], ScriptCall]
"""The commands that store a payload, and the call for it."""


class UploadTrip:
    """One round trip of `Store.upload_and_call`."""

    def __init__(self, store: Store, script: Script, key: str, make: Callable[[], Iterable[Upload]]) -> None:
        self._store, self._script, self._key, self._make = store, script, key, make
        self._places = range(0)  # of the script's replies among all answers
        self._keys: list[str] = []

    def replies(self) -> list[list[Any]]:
        """Of each call, once all of it is durable."""
        client = self._store.servers.client("bulk", self._key)
        try:
            answers = self._answers(client)
        except ResponseError as error:
            raise self._store.explain(self._script, self._keys, error) from error
        if self._store.durability.must_wait:
            self._store.durability.check(answers[self._places[-1] + 1 :])
        return [answers[place] for place in self._places]

    def _answers(self, client: Any) -> list[Any]:
        try:
            return send(client, self._commands())
        except NoScriptError:
            for script in (self._script, self._store.scripts["sync"]):
                client.script_load(script.source)
            return send(client, self._commands())

    def _commands(self) -> Iterator[Command]:
        calls: list[ScriptCall] = []
        small: list[Command] = []
        sent = 0
        for commands, call in self._make():
            for command in commands:
                if any(isinstance(part, memoryview) and len(part) >= _LARGE_BYTES for part in command):
                    sent += 1
                    yield command
                else:
                    small.append(command)
            calls.append(call)
        yield from small
        self._places = range(sent + len(small), sent + len(small) + len(calls))
        for call in calls:
            self._keys, args = self._script.arrange(*call)
            yield ("EVALSHA", self._script.sha, len(self._keys), *self._keys, *args)
        if self._store.durability.must_wait:
            sync = self._store.scripts["sync"].sha
            yield from self._store.durability.behind_script("EVALSHA", sync, self._key)
