"""Publication through a folder that trainer and workers share (design section 14).

A version is a folder `<lineage>-<M>` of safetensors, config and tokenizer with a manifest; it is written beside its
place and renamed, so nobody ever sees half of one.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

from buffer.rollout import PolicyVersion
from buffer.weights import manifest as weights_manifest
from consumer.model_folder import new_folder

VERSION = re.compile(r"\w+-\d{6,}")
"""What a folder of one version is named."""


class SharedFolder:
    """Versions of weights in `folder`; the newest `keep` stay. What else lies in the folder is left alone."""

    def __init__(self, folder: Path, *, keep: int = 3) -> None:
        self.folder, self._keep = folder.resolve(), keep
        self._newest: Path | None = None

    def path(self, weights: PolicyVersion) -> Path:
        """Where a version lies, or will."""
        return self.folder / f"{weights.lineage}-{weights.version:06d}"

    def write(self, weights: PolicyVersion, save: Callable[[Path], None]) -> tuple[str, str]:
        """Write one version with `save(folder)`. Returns (path, checksum) for `publish_weights`."""
        return self._write(weights, save, lambda folder: weights_manifest.write(folder, str(weights)))

    def copy(self, weights: PolicyVersion, save: Callable[[Path], None]) -> None:
        """The same of what has its manifest already, which `save` writes, too."""
        self._write(weights, save, lambda folder: "")

    def _write(
        self, weights: PolicyVersion, save: Callable[[Path], None], seal: Callable[[Path], str]
    ) -> tuple[str, str]:
        path = self.path(weights)
        if path.exists():
            shutil.rmtree(path)
        with new_folder(path) as folder:
            save(folder)
            checksum = seal(folder)
        self._newest = path
        return str(path), checksum

    def prune(self) -> None:
        """Delete all but the newest versions. Called after a publication, so that none in use disappears."""
        versions = [p for p in self.folder.iterdir() if VERSION.fullmatch(p.name) and p.is_dir()]
        # the newest by name as well: a clock that was set back must not make it the oldest
        newest_last = sorted(versions, key=lambda path: (path == self._newest, path.stat().st_mtime_ns))
        for path in newest_last[: -self._keep]:
            shutil.rmtree(path, ignore_errors=True)

    def clear(self) -> None:
        """Delete what a trainer left that was killed while it wrote."""
        for path in self.folder.glob(".*.tmp"):
            if VERSION.match(path.name[1:]):
                shutil.rmtree(path, ignore_errors=True)

    def close(self) -> None:
        """Nothing more will be published; what was stays."""
