"""Batches that are trained and committed: how long their bytes and manifests stay, and what is left
of them.

`commit` only archives. What is freed after that, and when, is said by the run's limits: at once,
all but the last N, or what an exporter has copied.
"""

from __future__ import annotations

from collections.abc import Iterator

from buffer.model.limits import RunLimits
from buffer.model.manifest import Manifest, ManifestEntry
from buffer.store.keys import Keys
from buffer.store.store import Store


class Archive:
    """The archived batches of one ledger."""

    def __init__(self, store: Store, keys: Keys, limits: RunLimits, name: str) -> None:
        self._store = store
        self._keys = keys
        self._limits = limits
        self._name = name

    def forget(self, *, exported: int = 0, everything: bool = False) -> int:
        """Free archived batches that are retained no longer; returns the newest step of which
        nothing is left.

        `exported`: batches up to this step were copied elsewhere, which frees them under
        `retain_until_exported`. Any process may call it, as often as it likes. Evaluations are not
        retained. `everything`: whatever is retained.
        """
        while (slice_ := self.forget_slice(exported=exported, everything=everything))[2]:
            pass
        return slice_[0]

    def forget_slice(self, *, exported: int = 0, everything: bool = False) -> tuple[int, int, int]:
        """A bounded part of `forget`: (newest step of which nothing is left, batches freed now,
        batches left).
        """
        limits = self._limits
        retains = self._name == "train" and not everything
        reply = self._store.call(
            "forget",
            self._keys.slots(ledger=self._name),
            {
                "retain": limits.retain_batches if retains else 0,
                "wait": int(limits.retain_until_exported and retains),
                "exported": exported,
                "limit": 1000,
            },
        )
        return int(reply[1]), int(reply[3]), int(reply[2])

    def steps(self) -> range:
        """The steps whose archived batches are still there: read them with `manifest` and
        `ReplayBuffer.get`.
        """
        forgotten, freed, _ = self._counters()
        return range(forgotten + 1, freed + 1)

    def entries(self) -> Iterator[ManifestEntry]:
        """The groups that are archived and whose bytes are still there, also those of a batch half
        archived.
        """
        forgotten, freed, done = self._counters()
        for step in range(forgotten + 1, freed + 2):
            manifest = self.manifest(step)
            entries = manifest.entries if manifest else []
            yield from entries if step <= freed else entries[:done]

    def manifest(self, step: int) -> Manifest | None:
        """The recorded manifest of a step, of which nothing is freed yet."""
        key = self._keys.batch(self._name, step)
        raw = self._store.retrying("manifest", lambda: self._store.control.lrange(key, 0, -1))
        lines = [line.decode() for line in raw]
        return Manifest.parse(step, lines) if lines else None

    def _counters(self) -> tuple[int, int, int]:
        names, ledger = ("forgotten", "freed", "slice"), self._keys.ledger(self._name)
        values = self._store.retrying("archived", lambda: self._store.control.hmget(ledger, *names))
        forgotten, freed, done = (int(value or 0) for value in values)
        return forgotten, freed, done
