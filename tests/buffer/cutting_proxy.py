"""A relay in front of a server that loses replies: the command is carried out, and nobody hears of
it.
"""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from pathlib import Path


class CuttingProxy:
    """Relays a Unix socket. After `cut(n)`, the next n replies that come are dropped with their
    connections.
    """

    def __init__(self, upstream: str, path: Path) -> None:
        self.url = f"unix://{path}"
        self.dropped = 0
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

    def _relay(self, source: socket.socket, target: socket.socket, replies: bool) -> None:
        try:
            while data := source.recv(65536):
                if replies and self._left:
                    self._left -= 1
                    self.dropped += 1
                    break
                target.sendall(data)
        except OSError:
            pass
        for end in (source, target):
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue
