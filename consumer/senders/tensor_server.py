"""The trainer's end of the transfer of weights from its memory into an engine's process.

TensorServer                                  TensorReceiver (producer_workers/engines)
  accepts, authenticates (rendezvous.py)        connects, authenticates
                                                "wanted": the label of a version
  "refusal": empty, or why not
  opens a process group (process_group.py)      opens it, too
  sends every file                              receives, compares each file's checksum
  "sent"                                        "verdict": empty, or what is wrong

Each process is served by a thread of its own, so a slow or dead one delays no other.

a worker dies                   its connections close, its thread ends; the others continue
a worker hangs                  its thread gives up after `stall_s` and frees its slot
the trainer dies
  before it published           the version is unknown; the next trainer publishes its own
  during a transfer             the receiver sees the connection close; its model is untouched
  later                         late workers read the copy on disk (transfer.py)

An engine loads the tensors once all its processes have all of them, so torn or wrong weights never
reach a model. Until then, each process holds a copy of the weights in host memory.
"""

from __future__ import annotations

import errno
import logging
import mmap
import secrets
import socket
import threading
from collections.abc import Mapping
from contextlib import closing, suppress
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir

import torch

from buffer.errors import ConfigError, WireError
from buffer.weights import folder_manifest as manifest
from buffer.weights.checksums import FileChecksums
from buffer.weights.new_folder import MEMORY_FOLDER
from buffer.weights.process_group import STALL_S, TRAINER, ProcessGroup
from buffer.weights.rendezvous import HANDSHAKE_S, Rendezvous
from buffer.weights.safetensors_files import parse_tensors
from buffer.weights.transport import Save

log = logging.getLogger("rolloutmq.trainer")

TENSORS_SUFFIX = ".safetensors"


class MemorySnapshot:
    """The files of the version `label`, and the manifest that a folder with these files has.

    A learner writes files: here into memory (/dev/shm, if it has room), mapped and deleted at once.
    So no disk delays them, and a killed trainer leaves nothing.
    """

    def __init__(
        self, label: str, files: Mapping[str, bytes | mmap.mmap], manifest_data: bytes
    ) -> None:
        self.label = label
        self.files = files
        self._manifest = manifest_data
        self.checksum = manifest.digest(manifest_data)

    @classmethod
    def take(cls, label: str, save: Save, prefix: str) -> MemorySnapshot:
        """Take what `save` writes. `prefix`: of the name of the temporary folder."""
        try:
            folder = MEMORY_FOLDER if MEMORY_FOLDER.is_dir() else Path(gettempdir())
            return cls._take(label, save, prefix, folder)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            log.warning(
                "%s is too small for the weights; writing them to %s", MEMORY_FOLDER, gettempdir()
            )
            return cls._take(label, save, prefix, Path(gettempdir()))

    @classmethod
    def _take(cls, label: str, save: Save, prefix: str, parent: Path) -> MemorySnapshot:
        with TemporaryDirectory(prefix=prefix, dir=parent) as name:
            folder = Path(name)
            manifest.write(folder, label, saved=save(folder))
            manifest_data = (folder / manifest.NAME).read_bytes()
            paths = [path for path in sorted(folder.iterdir()) if path.name != manifest.NAME]
            files = {path.name: _map(path) for path in paths}
        return cls(label, files, manifest_data)

    @property
    def weights(self) -> dict[str, mmap.mmap]:
        """The files that are sent: those with tensors, in order."""
        return {
            name: data
            for name, data in self.files.items()
            if name.endswith(TENSORS_SUFFIX) and isinstance(data, mmap.mmap)
        }

    def facts(self) -> dict[str, FileChecksums]:
        """Return size and checksum of each file that is sent."""
        listed = manifest.files_of(self._manifest)
        return {name: listed[name] for name in self.weights}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        files = [parse_tensors(memoryview(data)) for data in self.weights.values()]
        return {name: span.shape for file in files for name, span in file.items()}

    def save(self, folder: Path) -> None:
        """Write the files into a folder, the manifest last."""
        for name, data in (*self.files.items(), (manifest.NAME, self._manifest)):
            (folder / name).write_bytes(data)


def _map(file: Path) -> bytes | mmap.mmap:
    if not file.stat().st_size:
        return b""
    with file.open("rb") as stream:
        # copy on write: torch requires writable memory and never writes to it
        return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)


MAX_TRANSFERS = 8  # share the trainer's bandwidth; further workers wait

MAX_CONNECTIONS = 256
ACCEPT_RETRY_S = 1.0  # pause in accepting workers when connections ran out

VERDICT_S = 600.0  # limit for a worker's check of what it received


class TensorServer:
    """Sends the offered snapshot to every process that asks for it, from a free port of `host`.

    `token`: the secret that admits a process. Raises ConfigError.
    """

    def __init__(self, host: str, backend: str, *, stall_s: float = STALL_S) -> None:
        if backend == "nccl" and not torch.cuda.is_available():
            message = "weights_transport = nccl: torch finds no GPU here"
            raise ConfigError(message, hint="gloo works everywhere")
        self._backend = backend
        self._stall_s = stall_s
        self._gpu = torch.cuda.current_device() if backend == "nccl" else None
        self.token = secrets.token_hex(32)
        self._snapshot: MemorySnapshot | None = None
        self._closed = threading.Event()
        self._transfers = threading.BoundedSemaphore(MAX_TRANSFERS)
        self._connections = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._listener = _listen(host)
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, name="tensor-server", daemon=True).start()

    def offer(self, snapshot: MemorySnapshot) -> None:
        """Send only this snapshot from now on. Transfers of older ones continue."""
        self._snapshot = snapshot

    def close(self) -> None:
        self._snapshot = None
        self._closed.set()
        # some systems refuse it for a listening socket; others continue to accept without it
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, address = self._listener.accept()
            except OSError as error:
                if self._closed.wait(ACCEPT_RETRY_S):
                    return
                log.error("workers cannot connect for weights: %s", error)
                continue
            if not self._connections.acquire(blocking=False):
                connection.close()
                continue
            arguments = (connection, address[0])
            threading.Thread(
                target=self._serve, args=arguments, name="weights", daemon=True
            ).start()

    def _serve(self, connection: socket.socket, peer: str) -> None:
        try:
            with Rendezvous.accept(connection, self.token) as rendezvous:
                self._answer(rendezvous)
        except WireError as error:
            log.warning("weights did not reach a worker on %s: %s", peer, error)
        finally:
            self._connections.release()

    def _answer(self, rendezvous: Rendezvous) -> None:
        label = rendezvous.get("wanted", HANDSHAKE_S).decode(errors="replace")
        snapshot = self._snapshot
        if snapshot is None or snapshot.label != label:
            rendezvous.put("refusal", b"replaced by newer weights")
            rendezvous.get("verdict", self._stall_s)
            return
        with self._transfers:
            rendezvous.put("refusal", b"")
            verdict = self._send(rendezvous, snapshot)
        if verdict:
            raise WireError(f"the worker refused them: {verdict.decode(errors='replace')}")

    def _send(self, rendezvous: Rendezvous, snapshot: MemorySnapshot) -> bytes:
        """Send all files; return the peer's verdict: empty if they arrived unchanged."""
        group = ProcessGroup(
            torch, rendezvous, self._backend, TRAINER, stall_s=self._stall_s, gpu=self._gpu
        )
        with closing(group):
            for data in snapshot.weights.values():
                group.send(torch.frombuffer(data, dtype=torch.uint8))
            rendezvous.put("sent", b"")
            return rendezvous.get("verdict", VERDICT_S)


def _listen(host: str) -> socket.socket:
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        return socket.create_server(found[4][:2], family=found[0], backlog=MAX_CONNECTIONS)
    except OSError as error:
        hint = "set [policy] weights_host to an address of the trainer's machine"
        raise ConfigError(f"cannot listen on {host} to send weights: {error}", hint=hint) from error
