"""A run over TLS, with client certificates that the `openssl` command makes for the test.

Debian's Redis has TLS.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from buffer.errors import StoreError
from buffer.server.check import require_all_safe
from buffer.store.connection_errors import describe_connection_error
from buffer.store.store import Store
from tests.buffer.scene import Scene
from tests.servers import SAFE

DAYS = "3"
NEW_KEY = ("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


class Authority:
    """Certificates of one authority, in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
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


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    if not shutil.which("openssl"):
        pytest.skip("no openssl command on this machine")
    made = Authority(tmp_path_factory.mktemp("tls") / "ours")
    for name in ("server", "client"):
        made.issue(name)
    return made


@pytest.fixture(scope="module")
def port(authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """Start a Redis that requires TLS and a certificate of each client."""
    binary = shutil.which("redis-server")
    linked = subprocess.run(
        ["ldd", binary or "/"], capture_output=True, text=True, check=False
    ).stdout
    if not binary or "libssl" not in linked:
        pytest.skip("no redis-server with TLS on this machine")
    folder = tmp_path_factory.mktemp("server")
    process, number = _start(binary, folder, authority.folder)
    yield number
    process.kill()
    process.wait()


def _start(binary: str, folder: Path, certificates: Path) -> tuple[subprocess.Popen[bytes], int]:
    """Start the server on a port that was free; on another one if it is taken meanwhile."""
    for _ in range(20):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            number = probe.getsockname()[1]
        process = subprocess.Popen([
            binary, "--port", "0", "--tls-port", str(number), "--bind", "127.0.0.1", "--dir", str(folder), *SAFE,
            "--tls-cert-file", str(certificates / "server.crt"), "--tls-key-file", str(certificates / "server.key"),
            "--tls-ca-cert-file", str(certificates / "ca.crt"), "--tls-auth-clients", "yes", "--logfile", "log",
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


def test_a_run_goes_over_tls_with_a_client_certificate(
    authority: Authority, port: int, run_name: str
) -> None:
    url = authority.url(port, "client")
    store = Store(url, deadline_s=10.0)
    require_all_safe(store.servers)
    with redis.Redis.from_url(url) as raw:
        scene = Scene(store, raw, run_name)
        scene.open_trainer()
        scene.enqueue(2)
        for job in scene.claim(2):
            scene.submit(job)
        assert len(scene.take(1, math=2).entries) == 2
        scene.check()
    store.close()


def test_who_has_no_certificate_or_a_foreign_one_is_refused(
    authority: Authority, port: int, tmp_path: Path
) -> None:
    foreign = Authority(tmp_path / "foreign")
    foreign.issue("client")
    folder = foreign.folder
    other = f"&ssl_certfile={folder / 'client'}.crt&ssl_keyfile={folder / 'client'}.key"
    for url in (authority.url(port), authority.url(port) + other, foreign.url(port, "client")):
        store = Store(url, deadline_s=0.0)
        with pytest.raises(StoreError):
            store.retrying("ping", store.control.ping)
        store.close()
    with (
        redis.Redis.from_url(foreign.url(port, "client")) as client,
        pytest.raises(redis.ConnectionError) as refused,
    ):
        client.ping()
    assert "TLS with the server failed" in str(
        describe_connection_error(authority.url(port), refused.value)
    )
