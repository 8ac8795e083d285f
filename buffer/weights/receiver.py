"""A worker's side of all transports: the address of a version says how it is fetched.

The trainer's side is in transports.py. A version may be changes to the one before (delta.py):
they are applied to the version that the engine runs, or to the chain down to a whole one.

Invariant: the folder that `fetch` returns has the checksums of the whole version.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from buffer.errors import WireError
from buffer.redis.keys import Keys
from buffer.redis.store import Store
from buffer.weights import delta
from buffer.weights import folder_manifest as manifest
from buffer.weights.host_folders import HostFolders
from buffer.weights.redis_chunks import IN_CHUNKS, VersionStore
from buffer.weights.shared_folder import FolderSender
from buffer.weights.transport import PublishedWeights
from buffer.wire.rollout import PolicyVersion

LONGEST_CHAIN = 1000


class WeightsReceiver:
    """Fetches versions, once for all workers of a host; the loaded one stays until another is.

    Its methods raise OSError, WireError, ModelError, StoreUnavailable.
    """

    def __init__(self, store: Store, keys: Keys) -> None:
        self._versions = VersionStore(store, keys)
        self._folders = HostFolders()
        self._running: Path | None = None  # of the version that the engine runs
        self._wholes: dict[str, Path] = {}  # possible bases, by published checksum

    def check(self, published: PublishedWeights) -> None:
        """Check what a worker will find there, without reading the tensors."""
        if published.address.startswith(IN_CHUNKS):
            self._versions.record(published.address.removeprefix(IN_CHUNKS), published.checksum)
        else:
            manifest.check_files(Path(published.address), published.checksum)

    def fetch(self, published: PublishedWeights) -> Path:
        """Return a folder with these weights, verified. An empty checksum verifies nothing."""
        chain: list[tuple[PublishedWeights, Path]] = []
        folder = self._fetch_one(published)
        while delta.is_delta(folder):
            chain.append((published, folder))
            if len(chain) > LONGEST_CHAIN:
                raise WireError(f"more than {LONGEST_CHAIN} versions of weights without a whole")
            published = delta.base_of(folder)
            folder = self._wholes.get(published.checksum) or self._fetch_one(published)
        for changed, changes in reversed(chain):
            folder = self._apply(changes, folder, published, changed)
            published = changed
        if published.checksum:
            self._wholes[published.checksum] = folder
        return folder

    def keep_only(self, folder: Path) -> None:
        """Delete local copies other than `folder`, which the engine now runs."""
        self._running = folder
        self._wholes = {c: whole for c, whole in self._wholes.items() if whole == folder}
        self._folders.keep_only(folder)

    def close(self) -> None:
        """Delete all local copies."""
        self._folders.close()

    def _fetch_one(self, published: PublishedWeights) -> Path:
        """Return the verified folder of a version, which may hold changes."""
        address, checksum = published
        if not address.startswith(IN_CHUNKS):
            if checksum:
                manifest.verify(Path(address), checksum)
            return Path(address)
        label = address.removeprefix(IN_CHUNKS)
        return self._folders.get(
            f"redis-{checksum}",
            fill=lambda folder: self._versions.read(label, checksum, folder),
            check=lambda folder: manifest.verify(folder, checksum),
        )

    def _apply(
        self, changes: Path, base: Path, published: PublishedWeights, changed: PublishedWeights
    ) -> Path:
        try:
            result = self._folders.get(
                f"whole-{changed.checksum}",
                fill=lambda folder: delta.apply(changes, base, folder),
                check=lambda folder: delta.check(changes, folder),
            )
        except BaseException:
            # the base may be damaged: the next try fetches it again
            self._wholes.pop(published.checksum, None)
            raise
        if base != self._running:
            self._folders.release(base)
        return result


def find_version(
    store: Store, keys: Keys, folder: Path, weights: PolicyVersion
) -> PublishedWeights | None:
    """Return where a version is kept and its present checksum; None if it was deleted."""
    kept = FolderSender(folder).path(weights)
    with suppress(FileNotFoundError):
        return PublishedWeights(str(kept), manifest.digest((kept / manifest.NAME).read_bytes()))
    record = VersionStore(store, keys).find(str(weights))
    if record is None:
        return None
    return PublishedWeights(f"{IN_CHUNKS}{weights}", manifest.digest(record))
