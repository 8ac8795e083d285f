from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis

from buffer.errors import StoreError, StoreUnavailable, StoreUnsafe
from buffer.redis.errors import describe_connection_error
from buffer.redis.retry import is_transient
from buffer.redis.server.check import ServerFinding, check_server, require_all_safe, require_safe
from buffer.redis.store import Store
from buffer.redis.url import open_client
from tests.buffer.scene import Scene
from tests.servers import SAFE, Server, raw_client, start_redis
from tests.tls import Authority, start_tls_redis


def bad(findings: list[ServerFinding]) -> list[tuple[str, str]]:
    return [(found.level, found.what) for found in findings if found.level != "ok"]


@pytest.mark.without(
    "cluster", "memory", reason="its nodes are checked by check_all; memory is never safe"
)
def test_a_safe_server_has_nothing_to_complain_about(
    server: Server, redis_client: redis.Redis
) -> None:
    findings = check_server(redis_client)
    assert bad(findings) == []
    assert findings[0].what.lower().startswith(server.kind)
    assert require_safe(redis_client) == []


@contextmanager
def client_of(folder: Path, *options: str, **login: str) -> Iterator[redis.Redis]:
    """Yield a client of a new Redis that is safe but for `options`."""
    with start_redis(folder, *SAFE, *options) as url, raw_client(url, **login) as client:
        yield client


def test_a_server_without_room_for_more_connections_is_found(tmp_path: Path) -> None:
    with client_of(tmp_path, "--maxclients", "10") as client:
        others: list[Any] = [client.connection_pool.make_connection() for _ in range(7)]
        for other in others:
            other.connect()
        assert [found.level for found in check_server(client)].count("warning") == 1
        assert [what for level, what in bad(check_server(client))] == [
            "8 of 10 connections (maxclients) are used"
        ]
        for other in others:
            other.disconnect()
        while client.info("clients")["connected_clients"] > 1:  # the server notices one by one
            time.sleep(0.01)
        assert bad(check_server(client)) == []


@pytest.mark.parametrize(
    ("options", "level", "what"),
    [
        (("--maxmemory-policy", "allkeys-lru"), "error", "maxmemory-policy allkeys-lru"),
        (("--appendonly", "no"), "error", "the append-only file is off"),
        (("--appendfsync", "no"), "error", "appendfsync no"),
        (("--appendfsync", "everysec"), "warning", "appendfsync everysec"),
    ],
)
def test_a_setting_that_loses_data_is_found(
    tmp_path: Path, options: tuple[str, ...], level: str, what: str
) -> None:
    with client_of(tmp_path, *options) as client:
        assert bad(check_server(client)) == [(level, what)]
        if level == "error":
            with pytest.raises(StoreUnsafe, match=rf"{what}[^\n]*CONFIG SET"):
                require_safe(client)
        assert [found.what for found in require_safe(client, allow_unsafe=True)] == [what]


def test_a_replica_is_refused_even_if_unsafe_is_allowed(tmp_path: Path) -> None:
    with (
        client_of(tmp_path, "--replicaof", "127.0.0.1 1") as client,
        pytest.raises(StoreUnsafe, match=r"replica.*127\.0\.0\.1:1"),
    ):
        require_safe(client, allow_unsafe=True)


@pytest.mark.parametrize(("forbidden", "command"), [("-config", "CONFIG GET"), ("-info", "INFO")])
def test_a_user_who_may_not_look_gets_a_warning(
    tmp_path: Path, forbidden: str, command: str
) -> None:
    user = ["--user", "worker", "on", ">pw", "~*", "&*", "+@all", forbidden]
    with client_of(tmp_path, *user, username="worker", password="pw") as client:
        assert bad(check_server(client)) == [("warning", f"{command} is forbidden for this user")]
        assert len(require_safe(client)) == 1


class OldServer(redis.Redis):
    """Answers as servers that cannot be installed here would."""

    def __init__(self, **info: object) -> None:
        self.answer = info
        self.connection_pool = redis.ConnectionPool()

    def info(self, *sections: object, **options: object) -> dict[str, object]:
        return {"aof_enabled": 1, "maxmemory_policy": "noeviction", **self.answer}

    def config_get(self, *patterns: object, **options: object) -> dict[bytes, bytes]:  # type: ignore[override]
        return {b"appendfsync": b"always"}

    def __del__(self) -> None:
        return


@pytest.mark.parametrize(
    ("info", "what"),
    [
        ({"redis_version": "6.2.14"}, "Redis 6.2.14 is too old"),
        ({"redis_version": "7.0.0"}, None),
        ({"redis_version": "8.2.1"}, None),
        ({"redis_version": "7.2.4", "valkey_version": "7.2.4", "server_name": "valkey"}, None),
        ({"redis_version": "7.2.4", "server_name": "valkey", "valkey_version": "7.0.9"}, "Valkey 7.0.9 is too old"),
        ({"redis_version": "10.0.0"}, None),
    ],
)  # fmt: skip
def test_versions_are_told_apart(info: dict[str, str], what: str | None) -> None:
    assert bad(check_server(OldServer(**info))) == ([("error", what)] if what else [])


@pytest.mark.parametrize(
    ("info", "words"),
    [({"loading": 1}, "still loading"), ({"cluster_state": "fail"}, "does not serve all slots")],
)
def test_a_server_that_is_not_ready_is_transient(info: dict[str, object], words: str) -> None:
    with pytest.raises(redis.RedisError) as caught:
        require_safe(OldServer(redis_version="7.0.0", **info))
    assert is_transient(caught.value)
    found = describe_connection_error("redis://h/0", caught.value)
    assert isinstance(found, StoreUnavailable)
    assert words in found.message


# why it cannot be reached


def explain(url: str) -> StoreError:
    with (
        redis.Redis.from_url(url, socket_timeout=1.0) as client,
        pytest.raises(redis.RedisError) as caught,
    ):
        client.ping()
    found = describe_connection_error(url, caught.value)
    assert found.exit_code == 3
    assert found.hint
    return found


def test_a_wrong_password_is_explained_without_showing_it(tmp_path: Path) -> None:
    with start_redis(tmp_path, *SAFE, "--requirepass", "right") as url:
        wrong = explain(url.replace("unix://", "unix://me:hunter2@"))
        assert "refuses the user or password" in str(wrong)
        assert "hunter2" not in str(wrong)
        assert "requires a password" in str(explain(url))


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("redis://127.0.0.1:1/0", "no server listens there"),
        ("unix:///nowhere/none.sock", "there is no such socket"),
        ("redis://no-such-host.invalid:6379/0", "host name is not known"),
    ],
)
def test_a_server_that_is_not_there_is_explained(url: str, words: str) -> None:
    found = explain(url)
    assert isinstance(found, StoreUnavailable)
    assert words in str(found)


def test_tls_to_a_server_without_tls_is_explained(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with start_redis(tmp_path, *SAFE, "--port", str(port)):
        assert "TLS (rediss://) or not (redis://)" in str(explain(f"rediss://127.0.0.1:{port}/0"))


def test_a_server_that_says_nothing_is_explained() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        assert "no answer in time" in str(explain(f"redis://127.0.0.1:{silent.getsockname()[1]}/0"))


def test_a_database_that_does_not_exist_is_explained(tmp_path: Path) -> None:
    with start_redis(tmp_path, *SAFE) as url:
        assert "no such database" in str(explain(f"{url}?db=99"))


def test_a_forbidden_command_is_explained(tmp_path: Path) -> None:
    with start_redis(
        tmp_path, *SAFE, *["--user", "worker", "on", ">pw", "~*", "&*", "-@all"]
    ) as url:
        assert "ACL forbids" in str(explain(url.replace("unix://", "unix://worker:pw@")))


def test_memory_of_a_process_holds_no_run_of_others() -> None:
    with (
        open_client("memory://refused") as client,
        pytest.raises(StoreUnsafe, match="memory of one process"),
    ):
        require_safe(client, allow_unsafe=True)


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
