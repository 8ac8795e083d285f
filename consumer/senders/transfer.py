"""The transports "gloo" and "nccl": from the trainer's memory to an engine's, with a copy on disk.

write     takes a snapshot in memory, announces it in Redis, starts to copy it into the folder
publish   (the caller) names the announcement; engines fetch the tensors (tensor_server.py)
fallback  an engine that cannot, or does not reach the trainer, reads the copy in the folder

If the trainer dies, late workers read the copy; if it died before that was on disk, the next
trainer publishes the weights of its checkpoint. Recovery needs only the checkpoint (I5).
"""

from __future__ import annotations

import logging
import socket
import threading
from pathlib import Path
from urllib.parse import urlsplit

from buffer.redis.keys import Keys
from buffer.redis.store import Store
from buffer.weights.delta import DeltaSender
from buffer.weights.new_folder import clear_temporary, temporary_prefix
from buffer.weights.process_group import STALL_S
from buffer.weights.redis_chunks import RedisSender, VersionStore
from buffer.weights.shared_folder import FolderSender
from buffer.weights.transport import (
    Announcement,
    PublishedWeights,
    Save,
    TransportName,
    WeightsSender,
)
from buffer.wire.rollout import PolicyVersion
from consumer.senders.tensor_server import MemorySnapshot, TensorServer

log = logging.getLogger("rolloutmq.trainer")


def open_sender(
    name: TransportName,
    store: Store,
    keys: Keys,
    folder: Path,
    *,
    keep: int,
    host: str | None = None,
    delta_base_every: int = 1,
) -> WeightsSender:
    """Open the trainer's side of a transport that keeps the newest `keep` versions.

    `folder`: for the versions, or their copies. `host`: see `TransferSender`. `delta_base_every`:
    see `DeltaSender`; not for gloo and nccl.
    """
    if name in ("gloo", "nccl"):
        copies = FolderSender(folder, keep=keep)
        return TransferSender(store, keys, copies, name, host=host, keep=keep)
    keep += delta_base_every - 1  # what the oldest of them is made of
    sender: WeightsSender
    if name == "redis":
        sender = RedisSender(store, keys, folder, keep=keep)
    else:
        sender = FolderSender(folder, keep=keep)
    if delta_base_every == 1:
        return sender
    return DeltaSender(sender, folder.resolve(), delta_base_every)


class TransferSender:
    """Offers the newest version from memory.

    `backend` is gloo or nccl; `folder` gets the copies. `host`: the address that workers connect
    to; by default, the one from which this machine reaches the Redis server.
    """

    def __init__(
        self,
        store: Store,
        keys: Keys,
        folder: FolderSender,
        backend: str,
        *,
        host: str | None = None,
        keep: int = 3,
        stall_s: float = STALL_S,
    ) -> None:
        self._folder = folder
        self._backend = backend
        self._keep = keep
        self._stall_s = stall_s
        self._host = host or _address_towards(store.servers.url_of(keys.control))
        self._versions = VersionStore(store, keys)
        self._prefix = temporary_prefix(folder.folder)
        self._server: TensorServer | None = None
        self._copying: threading.Thread | None = None

    def write(self, weights: PolicyVersion, save: Save) -> PublishedWeights:
        """Take what `save` writes into memory, and announce it."""
        if self._server is None:
            self._server = TensorServer(self._host, self._backend, stall_s=self._stall_s)
        snapshot = MemorySnapshot.take(str(weights), save, self._prefix)
        self._server.offer(snapshot)
        published = self._announce(weights, snapshot, self._server)
        # one copy at a time: a disk slower than training slows it down, but memory stays free
        self._await_copy()
        self._copying = threading.Thread(
            target=self._copy, args=(weights, snapshot), name="weights-copy"
        )
        self._copying.start()
        return published

    def prune(self) -> None:
        """Delete all but the newest announcements. Old copies are deleted after each new one."""
        self._versions.prune(self._keep)

    def clear(self) -> None:
        clear_temporary(self._prefix)
        self._folder.clear()

    def close(self) -> None:
        """Wait until the newest weights are in the folder, then accept no worker any more."""
        self._await_copy()
        if self._server is not None:
            self._server.close()

    def _announce(
        self, weights: PolicyVersion, snapshot: MemorySnapshot, server: TensorServer
    ) -> PublishedWeights:
        announcement = Announcement(
            label=snapshot.label,
            backend=self._backend,
            host=self._host,
            port=server.port,
            token=server.token,
            folder=str(self._folder.path(weights)),
            checksum=snapshot.checksum,
            files=snapshot.facts(),
            tensors=snapshot.shapes(),
        )
        return self._versions.announce(announcement)

    def _await_copy(self) -> None:
        if self._copying is not None:
            self._copying.join()

    def _copy(self, weights: PolicyVersion, snapshot: MemorySnapshot) -> None:
        try:
            self._folder.copy(weights, snapshot.save)
            self._folder.prune()
        except OSError as error:
            # not fatal: live workers get the weights from memory
            log.error("cannot copy the weights %s to disk for late workers: %s", weights, error)


def _address_towards(url: str) -> str:
    """Return this machine's address on the route to a server; loopback for a Unix socket."""
    parts = urlsplit(url)
    if not parts.hostname:
        return "127.0.0.1"
    found = socket.getaddrinfo(parts.hostname, parts.port or 6379, type=socket.SOCK_DGRAM)
    family, kind, _, _, address = found[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # sends nothing
        return str(probe.getsockname()[0])
