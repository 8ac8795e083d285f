"""A relay in front of a server that loses replies: the command is carried out, and nobody hears of
it.
"""

from __future__ import annotations

import socket
import threading
from collections import Counter
from contextlib import suppress
from pathlib import Path

UPLOAD_BYTES = 65536


class CuttingProxy:
    """Relays a Unix socket. After `cut(n)`, the next n replies that come are dropped with their
    connections. With `every_bytes`, so is a reply to an upload whenever clients have sent so many
    bytes since the last cut; what they send again must be less.
    """

    def __init__(self, upstream: str, path: Path, *, every_bytes: int = 0) -> None:
        self.url = f"unix://{path}"
        self.dropped = 0
        self._every_bytes = every_bytes
        self._sent = 0
        self._unanswered = Counter[socket.socket]()
        self._upstream = upstream
        self._left = 0
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self, replies: int = 1) -> None:
        self._left = replies

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for end in self._open:
            with suppress(OSError):  # its relay has ended it
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.socket(socket.AF_UNIX)
            far.connect(self._upstream)
            self._open += [near, far]
            for source, target in ((near, far), (far, near)):
                threading.Thread(
                    target=self._relay, args=(source, target, source is far), daemon=True
                ).start()

    def _is_cut(self, client: socket.socket) -> bool:
        """Whether the reply that has come for this client is dropped."""
        is_upload = self._unanswered.pop(client, 0) >= UPLOAD_BYTES
        if self._left:
            self._left -= 1
            return True
        if not is_upload or not 0 < self._every_bytes <= self._sent:
            return False
        self._sent = 0
        return True

    def _relay(self, source: socket.socket, target: socket.socket, replies: bool) -> None:
        try:
            while data := source.recv(65536):
                if replies and self._is_cut(target):
                    self.dropped += 1
                    break
                if not replies:
                    self._sent += len(data)
                    self._unanswered[source] += len(data)
                target.sendall(data)
        except OSError:
            pass
        for end in (source, target):
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue
