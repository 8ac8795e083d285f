"""Errors of a server about a key of another type, with the name of the key.

The server and the client library say only that some key has the wrong type.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import redis
from redis.exceptions import ResponseError


class WrongType(ResponseError):
    """A command found another type of value under `key`."""

    def __init__(self, key: str) -> None:
        super().__init__(f"WRONGTYPE {key} is of another type")
        self.key = key


class NamingClient(redis.Redis):
    """A client of the library whose commands name the key in such an error."""

    def execute_command(self, *args: Any, **options: Any) -> Any:
        """Run a command as the library does. Raises WrongType."""
        try:
            return super().execute_command(*args, **options)  # type: ignore[no-untyped-call]
        except ResponseError as error:
            raise named(error, args) from error


def named(error: Exception, command: Sequence[Any]) -> Exception:
    """Return an error of a command with its key; a script has several, and names none."""
    is_known = isinstance(error, WrongType) or str(command[0]).startswith("EVAL")
    if is_known or not (isinstance(error, ResponseError) and str(error).startswith("WRONGTYPE")):
        return error
    words = [part.decode() if isinstance(part, bytes) else str(part) for part in command[1:3]]
    # XREAD has options before its keys
    words += [part for part in command[3:] if isinstance(part, str)]
    return WrongType(next((word for word in words if word.startswith("rmq")), words[0]))
