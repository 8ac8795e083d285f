"""Publication through Redis, for small models and adapters (design section 14): the same manifest and checksum."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from buffer.rollout import PolicyVersion
from buffer.run import Run
from buffer.weights import manifest as weights_manifest
from buffer.weights.redis_chunks import WeightsChunks


class RedisChunks:
    """Versions of weights on the run's server; the newest `keep` stay, and one more while it is published."""

    def __init__(self, run: Run, *, keep: int = 3) -> None:
        self._chunks, self._keep = WeightsChunks(run.store, run.keys), keep

    def write(self, weights: PolicyVersion, save: Callable[[Path], None]) -> tuple[str, str]:
        """Write one version with `save(folder)`. Returns (address, checksum) for `publish_weights`."""
        with TemporaryDirectory(prefix="rolloutmq-weights-") as name:
            folder = Path(name)
            save(folder)
            checksum = weights_manifest.write(folder, str(weights))
            return self._chunks.write(str(weights), folder), checksum

    def prune(self) -> None:
        """Delete all but the newest versions. A worker that still reads an older one is told of newer ones anyway."""
        for label in self._chunks.labels()[: -self._keep]:
            self._chunks.drop(label)

    def clear(self) -> None:
        """Delete what a trainer left that was killed while it wrote."""
        for label in self._chunks.labels():
            if not self._chunks.is_whole(label):
                self._chunks.drop(label)

    def close(self) -> None:
        """Nothing more will be published; what was stays."""
