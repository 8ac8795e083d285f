"""Versions as changes to the one before (delta.py), over any transport that carries folders.

The trainer keeps the last version whole. It publishes the first version after a start and every
n-th one whole, the others as changes where these are smaller. A worker applies changes to the
version that its engine runs, or fetches the chain down to a whole one, which the transport keeps.
"""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

from buffer.errors import WireError
from buffer.weights import delta
from buffer.weights import folder_manifest as manifest
from buffer.weights.checksums import Algorithm, WrittenFiles
from buffer.weights.host_folders import HostFolders
from buffer.weights.transport import (
    Announcement,
    PublishedWeights,
    Save,
    WeightsReceiver,
    WeightsSender,
)
from buffer.wire.rollout import PolicyVersion

log = logging.getLogger("rolloutmq.trainer")

LARGEST_SHARE = 0.5
"""Largest share of the whole version's bytes for which changes are worth a chain."""

LONGEST_CHAIN = 1000

PREFIX = ".base-"


class DeltaSender:
    """Publishes every `delta_base_every`-th version whole; `folder` keeps the last version."""

    def __init__(
        self, transport: WeightsSender, folder: Path, delta_base_every: int, algorithm: Algorithm
    ) -> None:
        self._transport = transport
        self._folder = folder
        self._delta_base_every = delta_base_every
        self._algorithm: Algorithm = algorithm
        self._base: tuple[Path, PublishedWeights] | None = None
        self._chain = 0  # versions since the newest whole one

    def write(self, weights: PolicyVersion, save: Save) -> PublishedWeights:
        label = str(weights)
        whole = self._folder / (PREFIX + label.replace(":", "-"))
        shutil.rmtree(whole, ignore_errors=True)
        whole.mkdir(parents=True)
        manifest.write(whole, label, algorithm=self._algorithm, saved=save(whole))
        published = self._transport.write(weights, lambda folder: self._fill(folder, whole))
        if self._base:
            shutil.rmtree(self._base[0], ignore_errors=True)
        self._base = (whole, published)
        return published

    def _fill(self, folder: Path, whole: Path) -> WrittenFiles:
        size = sum(file.stat().st_size for file in whole.iterdir())
        if self._base and self._chain + 1 < self._delta_base_every:
            written = delta.write(folder, whole, *self._base)
            log.info("weights as changes", extra={"bytes": written, "whole_bytes": size})
            if written <= LARGEST_SHARE * size:
                self._chain += 1
                return WrittenFiles()
            for file in folder.iterdir():
                file.unlink()
        self._chain = 0
        known = manifest.files_of((whole / manifest.NAME).read_bytes())
        for name in known:
            _link(whole / name, folder / name)
        return WrittenFiles(known)

    def prune(self) -> None:
        self._transport.prune()

    def clear(self) -> None:
        """Delete what a trainer left that was killed while it wrote."""
        for folder in self._folder.glob(f"{PREFIX}*"):
            shutil.rmtree(folder, ignore_errors=True)
        self._transport.clear()

    def close(self) -> None:
        if self._base:
            shutil.rmtree(self._base[0], ignore_errors=True)
        self._transport.close()


class DeltaReceiver(WeightsReceiver):
    """Makes whole versions of changes, once for all on the host.

    Invariant: the folder that `fetch` returns has the checksums of the whole version.
    """

    def __init__(self, transport: WeightsReceiver) -> None:
        self._transport = transport
        self._results = HostFolders()
        self._running: Path | None = None  # of the version that the engine runs
        self._wholes: dict[str, Path] = {}  # possible bases, by published checksum

    def check(self, published: PublishedWeights) -> None:
        self._transport.check(published)

    def announcement(self, published: PublishedWeights) -> Announcement | None:
        return self._transport.announcement(published)

    def fetch(self, published: PublishedWeights) -> Path:
        chain: list[tuple[PublishedWeights, Path]] = []
        folder = self._transport.fetch(published)
        while delta.is_delta(folder):
            chain.append((published, folder))
            if len(chain) > LONGEST_CHAIN:
                raise WireError(f"more than {LONGEST_CHAIN} versions of weights without a whole")
            published = delta.base_of(folder)
            known = self._wholes.get(published.checksum)
            folder = known or self._transport.fetch(published)
        for changed, changes in reversed(chain):
            folder = self._apply(changes, folder, published, changed)
            published = changed
        self._note(published, folder)
        return folder

    def _apply(
        self, changes: Path, base: Path, published: PublishedWeights, changed: PublishedWeights
    ) -> Path:
        try:
            result = self._results.get(
                f"whole-{changed.checksum}",
                fill=lambda folder: delta.apply(changes, base, folder),
                check=lambda folder: delta.check(changes, folder),
            )
        except BaseException:
            # the base may be damaged: the next try fetches it again
            self._wholes.pop(published.checksum, None)
            raise
        if base != self._running:
            self._results.release(base)
        return result

    def _note(self, published: PublishedWeights, folder: Path) -> None:
        if published.checksum:
            self._wholes[published.checksum] = folder

    def keep_only(self, folder: Path) -> None:
        self._running = folder
        self._wholes = {c: whole for c, whole in self._wholes.items() if whole == folder}
        self._results.keep_only(folder)
        self._transport.keep_only(folder)

    def close(self) -> None:
        self._results.close()
        self._transport.close()


def _link(source: Path, target: Path) -> None:
    """Give a file a second name, or copy it where the file system cannot."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
