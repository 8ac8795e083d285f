"""What judges said of texts, kept for all workers of a run, and what judging a task has used.

No text is a key: a verdict lies under a digest of all that its judge has read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass

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


def read_use(task: str, fields: Mapping[bytes, bytes]) -> JudgeUse:
    """Return what all processes have used for a task, from the hash `judge_use`."""
    total = [0, 0, 0, 0]
    for name, counts in fields.items():
        if name.decode().rpartition(" ")[0] == task:
            total = [a + int(b) for a, b in zip(total, counts.split(), strict=True)]
    return JudgeUse(*total)


class Verdicts:
    """The verdicts and the use of one task, for one process. Thread-safe.

    `entries`, `size`: the most verdicts and bytes that the run keeps; 0: it keeps none.
    """

    def __init__(self, context: RunContext, task: str, entries: int = 0, size: int = 0) -> None:
        self._store, self._keys = context.store, context.keys
        self._who = f"{task} {new_nonce()}"
        self._bounds: dict[str, Arg] = {"entries": entries, "most_bytes": size}
        self.use = JudgeUse()

    def find(self, digest: str) -> bytes | None:
        """Return the verdict of a digest. Raises StoreUnavailable."""
        if not self._bounds["entries"]:
            return None
        keys = (self._keys.verdicts, self._keys.verdicts_before)
        now, before = self._store.send("verdict", [("HGET", key, digest) for key in keys])
        found: bytes | None = before if now is None else now
        if found is not None:
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
        try:
            self._store.call("keep_verdict", self._keys.slots(), args)
        except StoreFull:  # a judge can be asked again
            return
