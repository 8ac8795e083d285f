"""Batches that were trained and committed, and how long their bytes and manifests are retained.

`commit` only archives; the run's limits define what is freed after that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from buffer.errors import RunDamaged
from buffer.manifest import Manifest, ManifestEntry
from buffer.redis.bounds import KEYS_PER_TRIP
from buffer.redis.key_fields import HINT, read_counts
from buffer.redis.scripts import ScriptCall
from buffer.redis.store import RunContext


def parse_manifest(key: str, step: int, lines: Sequence[str]) -> Manifest:
    try:
        return Manifest.parse(step, lines)
    except ValueError as error:
        text = f"the manifest of step {step} in {key} cannot be read: {error}"
        raise RunDamaged(text, hint=HINT) from error


class Forgotten(NamedTuple):
    """One slice of `ArchivedBatches.forget`."""

    newest: int  # newest step of which nothing is left
    freed: int  # batches freed by this slice
    left: int  # batches that are still to be freed

    @classmethod
    def parse(cls, reply: Sequence[str]) -> Forgotten:
        newest, left, freed = (int(number) for number in reply[1:])
        return cls(newest, freed, left)


class ArchivedBatches:
    def __init__(self, context: RunContext, name: str) -> None:
        self._store, self._keys, self._limits, _ = context
        self._name = name

    def forget(self, *, exported: int = 0, everything: bool = False) -> int:
        """Free archived batches whose retention has ended; return the newest step that is gone.

        Batches up to step `exported` were copied elsewhere, for `retain_until_exported`.
        `everything` also frees retained batches. Any process may call this at any time.
        """
        while True:
            done = self.forget_slice(exported=exported, everything=everything)
            if not done.left:
                return done.newest

    def forget_slice(self, *, exported: int = 0, everything: bool = False) -> Forgotten:
        """Free a bounded number of groups, as `forget` does."""
        call = self.forgetting(exported=exported, everything=everything)
        return Forgotten.parse(self._store.send("forget", [call])[0])

    def forgetting(self, *, exported: int = 0, everything: bool = False) -> ScriptCall:
        """Return the call of `forget_slice`."""
        limits = self._limits
        retains = self._name == "train" and not everything
        arguments = {
            "retain": limits.retain_batches if retains else 0,
            "wait": int(limits.retain_until_exported and retains),
            "exported": exported,
            "limit": KEYS_PER_TRIP,
        }
        return ScriptCall("forget", self._keys.slots(ledger=self._name), arguments)

    def exported(self) -> int:
        """Return the newest step that was copied elsewhere; 0: none."""
        ledger = self._keys.ledger(self._name)
        return int(self._store.ask("exported", "HGET", ledger, "exported") or 0)

    def steps(self) -> range:
        """Return the steps whose archived batches exist, for `manifest` and `ReplayBuffer.get`."""
        forgotten, freed, _ = self._counters()
        return range(forgotten + 1, freed + 1)

    def entries(self) -> Iterator[ManifestEntry]:
        """Yield the archived groups whose bytes exist, also of a batch that is being archived."""
        forgotten, freed, done = self._counters()
        for step in range(forgotten + 1, freed + 2):
            manifest = self.manifest(step)
            entries = manifest.entries if manifest else []
            yield from entries if step <= freed else entries[:done]

    def manifest(self, step: int) -> Manifest | None:
        """Return the recorded manifest of a step, or None if it was freed or never taken."""
        key = self._keys.batch(self._name, step)
        raw = self._store.ask("manifest", "LRANGE", key, 0, -1)
        lines = [line.decode() for line in raw]
        return parse_manifest(key, step, lines) if lines else None

    def _counters(self) -> tuple[int, int, int]:
        """Return the newest forgotten and archived steps, and the groups archived after them."""
        names = ("forgotten", "freed", "slice")
        ledger = self._keys.ledger(self._name)
        values = self._store.ask("archived", "HMGET", ledger, *names)
        forgotten, freed, done = read_counts(ledger, names, values)
        return forgotten, freed, done
