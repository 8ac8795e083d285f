"""Skipped groups: those whose prompts make no sense, with the reasons and records (`Skip`).

A list of each task has its newest 10,000; the bitmap of its ended draws has all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from buffer.errors import RunDamaged
from buffer.failure_text import cut_text
from buffer.redis.bounds import KEYS_PER_TRIP
from buffer.redis.key_fields import HINT
from buffer.redis.store import RunContext


@dataclass(frozen=True, slots=True)
class SkippedGroup:
    """`row`, `epoch`: its place in the data set. `id`: the record's own, if it has that field.

    `worker`: "" if its record function skipped it. `at_ms`: by the server's clock.
    """

    gid: str
    reason: str
    at_ms: int
    worker: str = ""
    row: int | None = None
    epoch: int | None = None
    id: str | None = None


def skip_letter(gid: str, reason: str, extra: Mapping[str, Any], worker: str = "") -> str:
    """Return what is kept of a skipped group; `extra`: of its rollouts."""
    place = {name: extra[name] for name in ("row", "epoch") if isinstance(extra.get(name), int)}
    if (own := extra.get("id")) is not None:
        place["id"] = cut_text(str(own))[:200]
    letter = {"gid": gid, "reason": cut_text(reason), "worker": worker, **place}
    return orjson.dumps(letter).decode()


class Skips:
    def __init__(self, context: RunContext) -> None:
        self._store, self._keys, self._limits, _ = context

    def newest(self, task: str | None = None) -> Iterator[SkippedGroup]:
        """Yield the skipped groups of a task, or of all, the newest of each first."""
        for name in [task] if task else self._limits.tasks:
            key, start = self._keys.skips(name), 0
            while lines := self._store.ask(
                "skips", "LRANGE", key, start, start + KEYS_PER_TRIP - 1
            ):
                for line in lines:
                    try:
                        _, at_ms, letter = line.split(b" ", 2)
                        yield SkippedGroup(at_ms=int(at_ms), **orjson.loads(letter))
                    except (ValueError, TypeError) as error:
                        raise RunDamaged(f"{key} cannot be read: {error}", hint=HINT) from error
                start += KEYS_PER_TRIP
