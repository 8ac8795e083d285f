"""A real S3 server on loopback, moto's, and a link to it that can be held in the middle."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from urllib.request import Request, urlopen

import pytest
from moto.server import ThreadedMotoServer

from tests.pipeline.conftest import *  # noqa: F403

BLOCK = 1 << 16


class Link:
    """A proxy that carries all bytes, or `hold` so many of them and then none until `open`."""

    def __init__(self, host: str, port: int) -> None:
        self._server = (host, port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._left: int | None = None
        self._changed = threading.Condition()
        self.held = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def endpoint(self) -> str:
        return "http://127.0.0.1:{1}".format(*self._listener.getsockname())

    def hold(self, after: int) -> None:
        """Stop when this many bytes, of both directions together, have passed."""
        with self._changed:
            self._left = after
            self.held.clear()

    def open(self) -> None:
        with self._changed:
            self._left = None
            self._changed.notify_all()

    def close(self) -> None:
        self._listener.close()
        self.open()

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._server)
                for ends in ((client, server), (server, client)):
                    threading.Thread(target=self._carry, args=ends, daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError), closing(target):  # an end was killed
            while data := source.recv(BLOCK):
                with self._changed:
                    if self._left is not None:
                        self._left -= len(data)
                        if self._left < 0:
                            self.held.set()
                            self._changed.wait_for(lambda: self._left is None)
                target.sendall(data)


@pytest.fixture(scope="session")
def s3() -> Iterator[tuple[str, int]]:
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    yield server.get_host_and_port()
    server.stop()


@pytest.fixture
def url(s3: tuple[str, int], run_name: str, monkeypatch: pytest.MonkeyPatch) -> str:
    endpoint = f"http://{s3[0]}:{s3[1]}"
    bucket = run_name.lower().replace("_", "-").strip("-")
    urlopen(Request(f"{endpoint}/{bucket}", method="PUT")).close()
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key-of-the-test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret-of-the-test")
    return f"s3://{bucket}/run"


@pytest.fixture
def link(s3: tuple[str, int]) -> Iterator[Link]:
    link = Link(*s3)
    yield link
    link.close()
