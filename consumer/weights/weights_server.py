"""The trainer's side of the meetings: hands its newest weights to every process of an engine that comes for them.

Each one is met on a thread of its own, pairwise, so one that is slow, stopped or killed in the middle holds up nobody
but itself, and not longer than `stall_s`; workers come and go without any of the others noticing.

    who dies                        what happens
    a worker, anywhere              its connections close, its thread ends; the snapshot stays for the others
    a worker hangs                  its thread gives up after `stall_s`, and frees its place
    the trainer, before it said     nobody knows of the version; the next trainer publishes its own
    the trainer, in a transfer      the engine's process sees the connection close, and has not touched its model
    the trainer, later              late ones read the folder behind it (consumer/weights/transfer.py)
"""

from __future__ import annotations

import logging
import secrets
import socket
import threading
from contextlib import closing, suppress

import torch
import torch.distributed  # the group needs it

from buffer.errors import ConfigError, WireError
from buffer.weights.process_group import TRAINER, ProcessGroup
from buffer.weights.rendezvous import HANDSHAKE_S, Rendezvous
from consumer.weights.weights_snapshot import WeightsSnapshot

log = logging.getLogger("rolloutmq.trainer")

AT_ONCE = 8
"""Transfers that share the way out; who comes then waits, up to WAITING that do."""

WAITING = 256
STALL_S = 30.0
"""A worker that takes no chunk for so long is given up."""

RETRY_S = 1.0
"""Until workers are listened to again, where this process has no room for another connection."""

VERDICT_S = 600.0
"""For the worker to check what it has got."""


class WeightsServer:
    """Listens on a free port of `host`. `token` is the secret that lets workers in. Raises ConfigError."""

    def __init__(self, host: str, backend: str, *, stall_s: float = STALL_S) -> None:
        if backend == "nccl" and not torch.cuda.is_available():
            raise ConfigError("weights_transport = nccl, and torch finds no GPU here", hint="gloo works everywhere")
        self._backend, self._stall_s = backend, stall_s
        self._gpu = torch.cuda.current_device() if backend == "nccl" else None
        self.token = secrets.token_hex(32)
        self._snapshot: WeightsSnapshot | None = None
        self._closed = threading.Event()
        self._places, self._callers = threading.BoundedSemaphore(AT_ONCE), threading.BoundedSemaphore(WAITING)
        self._listener = _listen(host)
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, name="weights-server", daemon=True).start()

    def offer(self, snapshot: WeightsSnapshot) -> None:
        """From here on only these; transfers of older ones go on, and keep theirs in memory."""
        self._snapshot = snapshot

    def close(self) -> None:
        """Nobody is met any more."""
        self._snapshot = None
        self._closed.set()
        with suppress(OSError):  # which some systems say of one that only listens; others would go on to accept
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, address = self._listener.accept()
            except OSError as error:
                if self._closed.wait(RETRY_S):
                    return
                log.error("no worker can come for weights now: %s", error)
                continue
            if not self._callers.acquire(blocking=False):
                connection.close()
                continue
            threading.Thread(target=self._meet, args=(connection, address[0]), name="weights", daemon=True).start()

    def _meet(self, connection: socket.socket, who: str) -> None:
        try:
            with Rendezvous.accept(connection, self.token) as rendezvous:
                self._answer(rendezvous)
        except WireError as error:
            log.warning("weights did not reach a worker on %s: %s", who, error)
        finally:
            self._callers.release()

    def _answer(self, rendezvous: Rendezvous) -> None:
        label, snapshot = rendezvous.get("wanted", HANDSHAKE_S).decode(errors="replace"), self._snapshot
        if snapshot is None or snapshot.label != label:
            rendezvous.put("refusal", b"newer weights took their place")
            rendezvous.get("verdict", self._stall_s)
            return
        with self._places:
            rendezvous.put("refusal", b"")
            verdict = self._send(rendezvous, snapshot)
        if verdict:
            raise WireError(f"it refused them: {verdict.decode(errors='replace')}")

    def _send(self, rendezvous: Rendezvous, snapshot: WeightsSnapshot) -> bytes:
        """What the other side says of them: nothing, where they are right."""
        group = ProcessGroup(rendezvous, self._backend, TRAINER, stall_s=self._stall_s, gpu=self._gpu)
        with closing(group):
            for data in snapshot.weights.values():
                group.send(torch.frombuffer(data, dtype=torch.uint8))
            rendezvous.put("sent", b"")
            return rendezvous.get("verdict", VERDICT_S)


def _listen(host: str) -> socket.socket:
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        return socket.create_server(found[4][:2], family=found[0], backlog=WAITING)
    except OSError as error:
        hint = "set [policy] weights_host to an address of the trainer's machine"
        raise ConfigError(f"weights cannot be handed over from {host}: {error}", hint=hint) from error
