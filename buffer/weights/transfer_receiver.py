"""A worker's side of "gloo" and "nccl": announcements in Redis, and a copy on disk.

The tensors pass from the trainer's memory to an engine's (`consumer/senders/transfer.py`), or
else a worker reads the copy.
"""

from __future__ import annotations

from pathlib import Path

from buffer.redis.keys import Keys
from buffer.redis.store import Store
from buffer.weights import folder_manifest as manifest
from buffer.weights.redis_chunks import VersionStore
from buffer.weights.shared_folder import FolderReceiver
from buffer.weights.transport import Announcement, PublishedWeights, WeightsReceiver

SCHEME = "transfer:"  # the version's label follows


class TransferReceiver(WeightsReceiver):
    def __init__(self, store: Store, keys: Keys) -> None:
        self._versions = VersionStore(store, keys)
        self._folder = FolderReceiver()

    def check(self, published: PublishedWeights) -> None:
        self.announcement(published)

    def announcement(self, published: PublishedWeights) -> Announcement:
        """Return the announcement. Raises WireError if it is missing or not the published one."""
        label = published.address.removeprefix(SCHEME)
        return Announcement.parse(self._versions.record(label, published.checksum))

    def fetch(self, published: PublishedWeights) -> Path:
        announced = self.announcement(published)
        return self._folder.fetch(PublishedWeights(announced.folder, announced.checksum))


def store_announcement(versions: VersionStore, announcement: Announcement) -> PublishedWeights:
    record = announcement.to_json()
    versions.begin(announcement.label)
    versions.finish(announcement.label, record)
    return PublishedWeights(SCHEME + announcement.label, manifest.digest(record))
