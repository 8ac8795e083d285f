"""The registry of transports. To add one, write its file and add it here, nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Literal

from buffer.redis.keys import Keys
from buffer.redis.store import Store
from buffer.weights import folder_manifest as manifest
from buffer.weights import redis_chunks, shared_folder, transfer_receiver
from buffer.weights.checksums import Algorithm
from buffer.weights.delta_transport import DeltaReceiver, DeltaSender
from buffer.weights.redis_chunks import RedisReceiver, RedisSender
from buffer.weights.shared_folder import FolderReceiver, FolderSender
from buffer.weights.transfer_receiver import TransferReceiver
from buffer.weights.transport import Announcement, PublishedWeights, WeightsReceiver, WeightsSender
from buffer.wire.rollout import PolicyVersion

TransportName = Literal["folder", "redis", "gloo", "nccl"]

# by scheme; the empty one matches all, so it is last
_RECEIVERS: dict[str, Callable[[Store, Keys], WeightsReceiver]] = {
    redis_chunks.SCHEME: RedisReceiver,
    transfer_receiver.SCHEME: TransferReceiver,
    shared_folder.SCHEME: lambda store, keys: FolderReceiver(),
}

_SENDERS: dict[str, Callable[..., WeightsSender]] = {
    "folder": lambda store, keys, folder, **options: FolderSender(folder, **options),
    "redis": RedisSender,
}


def open_sender(
    name: str,
    store: Store,
    keys: Keys,
    folder: Path,
    *,
    keep: int,
    algorithm: Algorithm = "xxh3",
    delta_base_every: int = 1,
) -> WeightsSender:
    """Open the trainer's side of a transport that needs no torch; see `consumer/senders`."""
    keep += delta_base_every - 1  # what the oldest of them is made of
    sender = _SENDERS[name](store, keys, folder, keep=keep, algorithm=algorithm)
    if delta_base_every == 1:
        return sender
    return DeltaSender(sender, folder.resolve(), delta_base_every, algorithm)


def find_version(
    store: Store, keys: Keys, folder: Path, weights: PolicyVersion
) -> PublishedWeights | None:
    """Return where a version is kept and its present checksum; None if it was deleted."""
    kept = FolderSender(folder).path(weights)
    with suppress(FileNotFoundError):
        return PublishedWeights(str(kept), manifest.digest((kept / manifest.NAME).read_bytes()))
    record = redis_chunks.VersionStore(store, keys).find(str(weights))
    if record is None:
        return None
    return PublishedWeights(f"{redis_chunks.SCHEME}{weights}", manifest.digest(record))


def open_receiver(store: Store, keys: Keys) -> WeightsReceiver:
    return DeltaReceiver(AnyReceiver(store, keys))


class AnyReceiver(WeightsReceiver):
    """Receives weights of every transport: a receiver is opened at the first use of its scheme."""

    def __init__(self, store: Store, keys: Keys) -> None:
        self._store = store
        self._keys = keys
        self._opened: dict[str, WeightsReceiver] = {}

    def check(self, published: PublishedWeights) -> None:
        self._receiver_of(published).check(published)

    def announcement(self, published: PublishedWeights) -> Announcement | None:
        return self._receiver_of(published).announcement(published)

    def fetch(self, published: PublishedWeights) -> Path:
        return self._receiver_of(published).fetch(published)

    def keep_only(self, folder: Path) -> None:
        for receiver in self._opened.values():
            receiver.keep_only(folder)

    def close(self) -> None:
        for receiver in self._opened.values():
            receiver.close()

    def _receiver_of(self, published: PublishedWeights) -> WeightsReceiver:
        scheme = next(each for each in _RECEIVERS if published.address.startswith(each))
        if scheme not in self._opened:
            self._opened[scheme] = _RECEIVERS[scheme](self._store, self._keys)
        return self._opened[scheme]
