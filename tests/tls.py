"""Certificates of an authority that the `openssl` command makes, and a Redis that demands them.

Debian's Redis has TLS.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cluster import free_ports
from tests.servers import SAFE

DAYS = "3"
NEW_KEY = ("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


class Authority:
    """Certificates of one authority, in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if not shutil.which("openssl"):
            pytest.skip("no openssl command on this machine")
        folder.mkdir()
        self._openssl(*NEW_KEY, "-x509", "-days", DAYS, "-subj", "/CN=test authority",
                      "-keyout", "ca.key", "-out", "ca.crt")  # fmt: skip

    def issue(self, name: str) -> None:
        """`name`.crt and `name`.key, for 127.0.0.1."""
        self._openssl(*NEW_KEY, "-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1",
                      "-keyout", f"{name}.key", "-out", f"{name}.csr")  # fmt: skip
        self._openssl("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial",
                      "-days", DAYS, "-copy_extensions", "copy", "-out", f"{name}.crt")  # fmt: skip

    def url(self, port: int, client: str = "") -> str:
        url = f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={self.folder / 'ca.crt'}"
        if not client:
            return url
        return (
            f"{url}&ssl_certfile={self.folder / client}.crt&ssl_keyfile={self.folder / client}.key"
        )

    def _openssl(self, *words: str) -> None:
        subprocess.run(["openssl", *words], cwd=self.folder, check=True, capture_output=True)


@contextmanager
def start_tls_redis(folder: Path, authority: Authority, *options: str) -> Iterator[int]:
    """Start a Redis that requires TLS and a certificate of each client; its port."""
    binary = shutil.which("redis-server")
    linked = subprocess.run(
        ["ldd", binary or "/"], capture_output=True, text=True, check=False
    ).stdout
    if not binary or "libssl" not in linked:
        pytest.skip("no redis-server with TLS on this machine")
    process, port = _start(binary, folder, authority.folder, *options)
    try:
        yield port
    finally:
        process.kill()
        process.wait()


def _start(
    binary: str, folder: Path, certificates: Path, *options: str
) -> tuple[subprocess.Popen[bytes], int]:
    """Start the server on a port that was free; on another one if it is taken meanwhile."""
    for _ in range(20):
        (number,) = free_ports(1)
        process = subprocess.Popen([
            binary, "--port", "0", "--tls-port", str(number), "--bind", "127.0.0.1", "--dir", str(folder), *SAFE,
            "--tls-cert-file", str(certificates / "server.crt"), "--tls-key-file", str(certificates / "server.key"),
            "--tls-ca-cert-file", str(certificates / "ca.crt"), "--tls-auth-clients", "yes", "--logfile", "log", *options,
        ], cwd=folder)  # fmt: skip
        if _answers(process, number):
            return process, number
    raise RuntimeError((folder / "log").read_text())


def _answers(process: subprocess.Popen[bytes], number: int) -> bool:
    """Whether the server listens, and has not ended because somebody else does."""
    for _ in range(1000):
        if process.poll() is not None:
            return False
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", number)) == 0:
                return True
        time.sleep(0.02)
    return False
