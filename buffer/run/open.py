"""Open the server and the run of a config: for workers, producers and trainers."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Protocol

import orjson
import redis

from buffer.config.run_settings import RedisSection, RunSection
from buffer.errors import ConfigError, RunNotFound, StoreUnavailable
from buffer.ids import new_nonce
from buffer.redis.errors import describe_connection_error
from buffer.redis.server.check import ServerFinding, fsync_policy, require_all_safe
from buffer.redis.server.embedded import EmbeddedServer
from buffer.redis.store import Store
from buffer.redis.whole_file import replace_file
from buffer.run.run import Run

log = logging.getLogger("rolloutmq.store")


class ServerConfig(Protocol):
    @property
    def run(self) -> RunSection: ...
    @property
    def redis(self) -> RedisSection: ...


def embedded_server(config: ServerConfig) -> EmbeddedServer:
    """Return the server in the run's own folder, whether it runs or not."""
    return EmbeddedServer(config.run.folder / "server")


def server_url(config: ServerConfig, flag: str | None = None) -> str:
    """Return the URL of `flag`, [redis] url, REDIS_URL or a running embedded server, in order.

    Raises StoreUnavailable for an embedded server that does not run.
    """
    if url := config.redis.resolve_url(flag):
        return url
    server = embedded_server(config)
    if not server.is_running:
        raise StoreUnavailable(
            f"no server: the embedded one in {server.folder} is not running, and no URL was given",
            hint="start the whole run with `rolloutmq run CONFIG`, or set REDIS_URL",
        )
    server.start()  # it stays for this process, even if a reader started it
    return server.url


def open_store(config: ServerConfig, url: str, *, name: str, patient: bool = False) -> Store:
    """Connect to a server that is new enough and safe, or raise StoreError or StoreUnsafe.

    Waits for an unreachable server if `patient`.
    """
    store = Store(url, name=name, deadline_s=config.redis.deadline_s)
    store.allow_unsafe = config.redis.allow_unsafe

    def check() -> list[ServerFinding]:
        try:
            store.waits_for_disk = can_wait_for_disk(store)
            return require_all_safe(store.servers, config.redis.allow_unsafe)
        except redis.RedisError as error:
            described = describe_connection_error(url, error)
            # a wrong password or certificate does not become right by waiting
            if patient and isinstance(described, StoreUnavailable):
                raise
            raise described from error

    for finding in store.retrying("first contact", check):
        if finding.level == "warning":
            log.warning("%s", finding)
    return store


def can_wait_for_disk(store: Store) -> bool:
    """Return whether durable calls must, and can, wait for the server's disk.

    They need not with appendfsync always, cannot without WAITAOF (Redis 7.2, Valkey), and wait
    under an unknown policy: that costs little, and is right for each.
    """
    policies = []
    for _, client in store.servers.masters():
        policies.append(fsync_policy(client))
        try:
            client.execute_command("WAITAOF", 0, 0, 1)
        except redis.ResponseError:
            return False
    return any(policy != "always" for policy in policies)


def run_nonce(folder: Path) -> str:
    """Return the nonce of the run in this folder, made on first use. It tells namesakes apart."""
    file = folder / "run.json"
    if not file.exists():
        write_nonce(folder, new_nonce())
    try:
        nonce: str = orjson.loads(file.read_bytes())["nonce"]
    except (orjson.JSONDecodeError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{file} does not contain the nonce of a run",
            hint="remove it: the next start writes it again, or says how",
        ) from error
    return nonce


def write_nonce(folder: Path, nonce: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / "run.json", orjson.dumps({"nonce": nonce}))


def own_run(store: Store, config: ServerConfig) -> Run | None:
    """Return the run of this config's folder as it is; None where the server does not have it."""
    try:
        run = Run.open(store, config.run.name)
    except RunNotFound:
        return None
    is_known = (config.run.folder / "run.json").exists()
    return run if is_known and run_nonce(config.run.folder) == run.nonce else None


def wait_for_run(store: Store, name: str) -> Run:
    """Open a run, and wait until it is created. Raises RunNotFound after ten minutes."""
    end = time.monotonic() + 600.0
    has_warned = False
    while True:
        try:
            return Run.open(store, name)
        except RunNotFound:
            if time.monotonic() > end:
                raise
        if not has_warned:
            log.warning("there is no run %r yet; waiting until it is created", name)
            has_warned = True
        time.sleep(1.0)
