"""Publication through a folder that trainer and workers share (design section 14).

A version is a folder `<lineage>-<M>` of safetensors, config and tokenizer with a manifest; it is written beside its
place and renamed, so nobody ever sees half of one.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from buffer import weights_manifest
from buffer.rollout import PolicyVersion
from consumer.model_folder import new_folder


class SharedFolder:
    """Versions of weights in `folder`; the newest `keep` stay."""

    def __init__(self, folder: Path, *, keep: int = 3) -> None:
        self._folder, self._keep = folder.resolve(), keep

    def write(self, weights: PolicyVersion, save: Callable[[Path], None]) -> tuple[str, str]:
        """Write one version with `save(folder)`. Returns (path, checksum) for `publish_weights`."""
        path = self._folder / f"{weights.lineage}-{weights.version:06d}"
        if path.exists():
            shutil.rmtree(path)
        with new_folder(path) as folder:
            save(folder)
            checksum = weights_manifest.write(folder, str(weights))
        return str(path), checksum

    def prune(self) -> None:
        """Delete all but the newest versions. Called after a publication, so that none in use disappears."""
        folders = [p for p in self._folder.iterdir() if p.is_dir() and not p.name.startswith(".")]
        newest_last = sorted(folders, key=lambda path: path.stat().st_mtime_ns)
        for path in newest_last[: -self._keep]:
            shutil.rmtree(path, ignore_errors=True)
