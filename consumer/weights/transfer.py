"""Publication from memory to memory: workers come to the trainer, each for itself, and the folder is behind it.

    write    a snapshot in memory; an announcement in Redis; a copy in the folder begins, on a thread
    publish  (the caller) names the announcement; workers that hear of it come (weights_server.py)
    a worker that meets nobody, or an engine that cannot receive, reads the folder

So while a trainer lives, no worker waits for a disk, and once it is dead, whoever comes late still has the newest
weights, unless it died in the second before they were on disk: then the next trainer publishes those of its
checkpoint, as it always does. Nothing here is needed for recovery (I5): that is the checkpoint's.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from urllib.parse import urlsplit

from buffer.rollout import PolicyVersion
from buffer.run import Run
from buffer.weights.announcement import Announcement, Announcements
from consumer.weights import weights_snapshot
from consumer.weights.shared_folder import SharedFolder
from consumer.weights.weights_server import STALL_S, WeightsServer
from consumer.weights.weights_snapshot import WeightsSnapshot

log = logging.getLogger("rolloutmq.trainer")


class WeightTransfer:
    """`backend` is gloo or nccl. `host`: the address that workers connect to; default: towards the Redis server."""

    def __init__(
        self,
        run: Run,
        folder: SharedFolder,
        backend: str,
        *,
        host: str | None = None,
        keep: int = 3,
        stall_s: float = STALL_S,
    ) -> None:
        self._folder, self._backend, self._keep, self._stall_s = folder, backend, keep, stall_s
        self._host = host or _address_towards(run.store.servers.url_of(run.keys.control))
        self._announcements = Announcements(run.store, run.keys)
        # of this run even where it was created anew on a server that lost it: what was left is found
        self._prefix = f"rolloutmq-{blake2b(str(folder.folder).encode(), digest_size=8).hexdigest()}-"
        self._server: WeightsServer | None = None
        self._copying: threading.Thread | None = None

    def write(self, weights: PolicyVersion, save: Callable[[Path], None]) -> tuple[str, str]:
        """Take what `save(folder)` writes into memory. Returns (address, checksum) for `publish_weights`."""
        self._server = self._server or WeightsServer(self._host, self._backend, stall_s=self._stall_s)
        snapshot = WeightsSnapshot.take(str(weights), save, self._prefix)
        announcement = Announcement(
            label=snapshot.label,
            backend=self._backend,
            host=self._host,
            port=self._server.port,
            token=self._server.token,
            folder=str(self._folder.path(weights)),
            checksum=snapshot.checksum,
            files=snapshot.facts(),
            tensors=snapshot.shapes(),
        )
        self._server.offer(snapshot)
        published = self._announcements.write(announcement)
        self._await_copy()  # one at a time: a disk that is slower than training slows it down, not fills the memory
        self._copying = threading.Thread(target=self._copy, args=(weights, snapshot), name="weights-copy")
        self._copying.start()
        return published

    def prune(self) -> None:
        """Delete all but the newest announcements. The folder's old versions go when a newer one is in it."""
        self._announcements.prune(self._keep)

    def clear(self) -> None:
        """Delete what a trainer left that was killed while it wrote."""
        weights_snapshot.clear(self._prefix)
        self._folder.clear()

    def close(self) -> None:
        """The newest weights are in the folder then, and nobody is met any more."""
        self._await_copy()
        if self._server is not None:
            self._server.close()

    def _await_copy(self) -> None:
        if self._copying is not None:
            self._copying.join()

    def _copy(self, weights: PolicyVersion, snapshot: WeightsSnapshot) -> None:
        try:
            self._folder.copy(weights, snapshot.save)
            self._folder.prune()
        except OSError as error:
            # training goes on, and so do workers that live: they have met the trainer
            log.error("no copy of the weights %s for late workers: %s", weights, error)


def _address_towards(url: str) -> str:
    """This machine's address on its way to a server; the loopback one for a server on a Unix socket."""
    parts = urlsplit(url)
    if not parts.hostname:
        return "127.0.0.1"
    family, kind, _, _, address = socket.getaddrinfo(parts.hostname, parts.port or 6379, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # sends nothing
        return str(probe.getsockname()[0])
