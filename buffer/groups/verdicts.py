"""What judges said of texts, kept for all workers of a run, and what judging a task has used.

No text is a key: a verdict lies under a digest of all that its judge has read.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import astuple, dataclass
from threading import Lock

from buffer.errors import StoreFull
from buffer.ids import new_nonce
from buffer.redis.scripts import Arg
from buffer.redis.store import RunContext

MOST_BYTES = 65_536
"""Longer verdicts are not kept."""


@dataclass(slots=True)
class JudgeUse:
    """Calls of a task's judges, those answered from the cache, and tokens of a language model."""

    calls: int = 0
    cached: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def __add__(self, other: JudgeUse) -> JudgeUse:
        return JudgeUse(*map(sum, zip(astuple(self), astuple(other), strict=True)))


def use_by_task(fields: Mapping[bytes, bytes]) -> dict[str, JudgeUse]:
    """Return what all processes have used for each task, from the hash `judge_use`."""
    found: dict[str, JudgeUse] = {}
    for name, counts in fields.items():
        task = name.decode().rpartition(" ")[0]
        found[task] = found.get(task, JudgeUse()) + JudgeUse(*map(int, counts.split()))
    return found


class Verdicts:
    """The verdicts and the use of one task, for one process. Thread-safe.

    `entries`, `size`: the most verdicts and bytes that the run keeps; 0: it keeps none.
    """

    def __init__(self, context: RunContext, task: str, entries: int = 0, size: int = 0) -> None:
        self._store, self._keys = context.store, context.keys
        self._who = f"{task} {new_nonce()}"
        self._bounds: dict[str, Arg] = {"entries": entries, "most_bytes": size}
        self.use = JudgeUse()
        self._lock = Lock()  # of `cached`, which several threads count

    def find(self, digest: str) -> bytes | None:
        """Return the verdict of a digest. Raises StoreUnavailable."""
        if not self._bounds["entries"]:
            return None
        keys = (self._keys.verdicts, self._keys.verdicts_before)
        now, before = self._store.send("verdict", [("HGET", key, digest) for key in keys])
        found: bytes | None = before if now is None else now
        if found is not None:
            with self._lock:
                self.use.cached += 1
            self.note(digest, found)
        return found

    def note(self, digest: str, verdict: bytes = b"") -> None:
        """Keep a verdict, unless it is empty, and write what this process has used.

        Raises StoreUnavailable.
        """
        is_kept = self._bounds["entries"] and len(verdict) <= MOST_BYTES
        args: dict[str, Arg] = {
            "digest": digest,
            "verdict": verdict if is_kept else b"",
            "who": self._who,
            "counts": " ".join(map(str, astuple(self.use))),
            **self._bounds,
        }
        # a judge can be asked again, and what it used is written with the next verdict
        with suppress(StoreFull):
            self._store.call("keep_verdict", self._keys.slots(), args)
