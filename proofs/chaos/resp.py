"""As much of the Redis protocol as a relay must know: where a command ends, and which script it
runs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from buffer.redis.scripts import library

_NAMES = {script.sha.encode(): name for name, script in library().items()}


@dataclass(frozen=True, slots=True)
class Command:
    """One whole command as it was sent; `script` is "" for everything but EVAL and EVALSHA."""

    data: bytes
    script: str


def split_commands(data: bytes) -> tuple[list[Command], bytes]:
    """The whole commands at the start of `data`, and what is left of it: the beginning of one more."""
    commands, place = [], 0
    while (end := _end_of(data, place)) is not None:
        commands.append(Command(data[place:end], _script(data[place : place + 200])))
        place = end
    return commands, data[place:]


def _end_of(data: bytes, place: int) -> int | None:
    """Where the array of bulk strings at `place` ends; None where not all of it is there."""
    words = _number(data, place)
    if words is None:
        return None
    count, place = words
    for _ in range(count):
        word = _number(data, place)
        if word is None:
            return None
        place = word[1] + word[0] + 2
    return place if place <= len(data) else None


def _number(data: bytes, place: int) -> tuple[int, int] | None:
    """The number behind `*` or `$`, and where its line ends."""
    end = data.find(b"\r\n", place)
    return None if end < 0 else (int(data[place + 1 : end]), end + 2)


def _script(head: bytes) -> str:
    if match := re.search(rb"\r\nEVALSHA\r\n\$40\r\n([0-9a-f]{40})\r\n", head):
        return _NAMES.get(match[1], "unknown")
    match = re.search(rb"\r\nEVAL\r\n.*?-- rolloutmq (\w+)", head, re.DOTALL)
    return match[1].decode() if match else ""
