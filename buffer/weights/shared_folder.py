"""The transport "folder": a folder that trainer and workers share.

A version is a folder `<lineage>-<M>` with a manifest, written beside its path and renamed.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from buffer.weights import folder_manifest as manifest
from buffer.weights.new_folder import new_folder
from buffer.weights.transport import PublishedWeights, Save
from buffer.wire.rollout import PolicyVersion

VERSION = re.compile(r"\w+-\d{6,}")


class FolderSender:
    """Versions of weights in `folder`. The newest `keep` stay; other contents are left alone."""

    def __init__(self, folder: Path, *, keep: int = 3) -> None:
        self.folder = folder.resolve()
        self.folder.mkdir(parents=True, exist_ok=True)
        self._keep = keep
        self._newest: Path | None = None

    def path(self, weights: PolicyVersion) -> Path:
        return self.folder / f"{weights.lineage}-{weights.version:06d}"

    def write(self, weights: PolicyVersion, save: Save) -> PublishedWeights:
        """Write one version (`save` writes its files) and its manifest, over an older attempt."""
        path = self.path(weights)
        with self._replaced(path) as folder:
            checksum = manifest.write(folder, str(weights), saved=save(folder))
        return PublishedWeights(str(path), checksum)

    @contextmanager
    def _replaced(self, path: Path) -> Iterator[Path]:
        if path.exists():
            shutil.rmtree(path)
        with new_folder(path) as folder:
            yield folder
        self._newest = path

    def prune(self) -> None:
        """Delete all but the newest versions, after a publication: none in use may disappear."""
        versions = [p for p in self.folder.iterdir() if VERSION.fullmatch(p.name) and p.is_dir()]
        # the one just written counts as the newest even if the clock was set back
        versions.sort(key=lambda path: (path == self._newest, path.stat().st_mtime_ns))
        for path in versions[: -self._keep]:
            shutil.rmtree(path, ignore_errors=True)

    def clear(self) -> None:
        """Delete what a trainer left that was killed while it wrote."""
        for path in self.folder.glob(".*.tmp"):
            if VERSION.match(path.name[1:]):
                shutil.rmtree(path, ignore_errors=True)

    def close(self) -> None:
        """Do nothing: what was published stays."""
