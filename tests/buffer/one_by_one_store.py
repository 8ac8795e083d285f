"""A store that makes each call of a script by itself, so that a test can look at it before it is
made.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import redis

from buffer.redis.script_calls import Upload
from buffer.redis.scripts import Arg, KeysByName, Script, library
from tests.buffer.two_trip_store import TwoTripStore


class OneByOneStore(TwoTripStore):
    """`look` is told of every call, with its keys and arguments as the server gets them; its script
    is loaded.

    `raw` is a client of the same server that may do anything to `run`.
    """

    def __init__(self, url: str, raw: redis.Redis, run: str) -> None:
        super().__init__(url, deadline_s=5.0)
        self.raw: Any = raw
        self.run = run

    def look(self, script: Script, keys: list[str], args: list[Arg]) -> None:
        """A call is about to be made."""
        raise NotImplementedError

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
        entry = library()[script]
        self.raw.script_load(entry.source)
        self.look(entry, *entry.arrange(keys, args, tail_keys, tail_args))
        return super().call(script, keys, args, tail_keys, tail_args, durable=durable)

    def call_many(
        self, script: str, calls: Iterable[tuple[KeysByName, Mapping[str, Arg]]]
    ) -> list[list[Any]]:
        return [self.call(script, *call) for call in calls]

    def upload_and_call(self, script: str, key: str, uploads: Iterable[Upload]) -> list[list[Any]]:
        replies = []
        for commands, call in uploads:
            self.write("upload", commands)
            replies.append(self.call(script, *call, durable=True))
        return replies
