"""A store whose every script call passes `call`, where tests watch it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from buffer.redis.connection.bulk_io import Command
from buffer.redis.scripts import Arg, KeysByName
from buffer.redis.store import Store


class TwoTripStore(Store):
    def call_and_read(
        self,
        script: str,
        keys: KeysByName,
        args: Mapping[str, Arg],
        tail_args: Sequence[Arg],
        read: Command,
    ) -> tuple[list[Any], Any]:
        reply = self.call(script, keys, args, (), tail_args)
        return reply, self.retrying("read", lambda: self.control.execute_command(*read))
