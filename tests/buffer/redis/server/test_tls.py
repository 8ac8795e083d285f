"""A run over TLS, with client certificates; a run with a role for each process is in
tests/pipeline/test_roles_over_tls.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from buffer.errors import StoreError
from buffer.redis.errors import describe_connection_error
from buffer.redis.server.check import require_all_safe
from buffer.redis.store import Store
from tests.buffer.scene import Scene
from tests.servers import raw_client
from tests.tls import Authority, start_tls_redis


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    made = Authority(tmp_path_factory.mktemp("tls") / "ours")
    for name in ("server", "client"):
        made.issue(name)
    return made


@pytest.fixture(scope="module")
def port(authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with start_tls_redis(tmp_path_factory.mktemp("server"), authority) as number:
        yield number


def test_a_run_goes_over_tls_with_a_client_certificate(
    authority: Authority, port: int, run_name: str
) -> None:
    url = authority.url(port, "client")
    store = Store(url, deadline_s=400.0)
    require_all_safe(store.servers)
    with raw_client(url) as raw:
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
            store.retrying("ping", store.client.ping)
        store.close()
    with (
        raw_client(foreign.url(port, "client")) as client,
        pytest.raises(redis.ConnectionError) as refused,
    ):
        client.ping()
    assert "TLS with the server failed" in str(
        describe_connection_error(authority.url(port), refused.value)
    )
