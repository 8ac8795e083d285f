"""Opens the server and the run of a config: for workers, producers and trainers."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import orjson
import redis
from redis.exceptions import NoPermissionError

from buffer.config.config import ConfigFile
from buffer.config.fingerprint import origin_of
from buffer.control.continuation import Start
from buffer.control.kept_settings import KeptSettings
from buffer.errors import ConfigError, RunExists, RunNotFound, StoreUnavailable
from buffer.maintenance.regeneration import Regeneration
from buffer.model.ids import new_nonce
from buffer.redis.connection_errors import describe_connection_error
from buffer.redis.server.check import Finding, fsync_policy, require_all_safe
from buffer.redis.server.embedded import EmbeddedServer
from buffer.redis.store import Store
from buffer.rollouts.rollout import FIRST_WEIGHTS
from buffer.run import Run

log = logging.getLogger("rolloutmq.store")


def embedded_server(config: ConfigFile) -> EmbeddedServer:
    """Return the server in the run's own folder, whether it runs or not."""
    return EmbeddedServer(config.run.folder / "server")


def server_url(config: ConfigFile, flag: str | None = None) -> str:
    """Return the URL from `flag`, [redis] url, REDIS_URL or the embedded server, in this order.

    Raises StoreUnavailable when it would be the embedded server, and that does not run.
    """
    if url := config.redis.resolve_url(flag):
        return url
    server = embedded_server(config)
    if not server.is_running:
        raise StoreUnavailable(
            f"no server: the embedded one in {server.folder} is not running, and no URL was given",
            hint="start the whole run with `rolloutmq run CONFIG`, or set REDIS_URL",
        )
    return server.url


def open_store(config: ConfigFile, url: str, *, name: str, patient: bool = False) -> Store:
    """Connect to a server, and check that it is new enough and loses no data.

    Waits for an unreachable server if `patient`. Raises StoreError or StoreUnsafe.
    """
    store = Store(url, name=name, deadline_s=config.redis.deadline_s)
    store.allow_unsafe = config.redis.allow_unsafe

    def check() -> list[Finding]:
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
    """Return whether durable calls must wait for the server's disk, and can.

    They need not with appendfsync always, and cannot without WAITAOF (Redis 7.2, Valkey). Where the
    policy is not known, they wait: that costs little, and is right for each.
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
    """Return the nonce of the run in this folder, made on first use.

    It distinguishes this run from others of its name.
    """
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
    """Make `folder` that of the run with this nonce."""
    folder.mkdir(parents=True, exist_ok=True)
    # renamed when it is whole: a process that dies here must not leave half a nonce
    part = folder / "run.tmp"
    part.write_bytes(orjson.dumps({"nonce": nonce}))
    part.rename(folder / "run.json")


def create_run(
    store: Store,
    config: ConfigFile,
    model_dir: Path,
    regeneration: Regeneration | None = None,
    *,
    by_hand: bool = True,
    is_done: Callable[[int], bool] = lambda steps: False,
) -> Run:
    """Create the run of this config, or continue it with this config (`Run.changes`).

    With `regeneration`, what the server has of it is cleared first. Not `by_hand`, a run that
    exists keeps all of its settings. `is_done`: returns whether a run with so many steps has
    nothing left to do; it then stays finished. Raises RunExists when the name belongs to the run of
    another folder, ConfigError when the server's maxmemory is too small for the run, or an edited
    config cannot continue it.
    """
    maxmemory = maxmemory_bytes(store)
    if problem := config.memory_problem(config.memory.budget(maxmemory)):
        raise ConfigError(problem)
    config.run.make_folder()  # the umask of a process that is not ours is not changed
    if regeneration is None:
        _restore_nonce(store, config)
    elif regeneration.position.run_nonce and not (config.run.folder / "run.json").exists():
        write_nonce(config.run.folder, regeneration.position.run_nonce)
    nonce = run_nonce(config.run.folder)
    limits = config.limits(maxmemory)
    path = str(model_dir.resolve())
    origin = origin_of(config, model_dir)
    kept = KeptSettings(config.run.folder, nonce)
    start = Start(by_hand, config.written(), kept.read, is_done)
    run = Run.create(
        store, config.run.name, nonce, limits, FIRST_WEIGHTS, path, origin, start, regeneration
    )
    kept.keep(run.settings)
    return run


def own_run(store: Store, config: ConfigFile) -> Run | None:
    """Return the run of this config's folder as it is; None where the server does not have it."""
    try:
        run = Run.open(store, config.run.name)
    except RunNotFound:
        return None
    is_known = (config.run.folder / "run.json").exists()
    return run if is_known and run_nonce(config.run.folder) == run.nonce else None


def _restore_nonce(store: Store, config: ConfigFile) -> None:
    """Write a lost run.json again, where the server shows that the run is this folder's.

    Raises RunExists for a run of this name on another server.
    """
    folder = config.run.folder
    if (folder / "run.json").exists() or config.run.name not in Run.names(store):
        return
    nonce = Run.open(store, config.run.name).nonce
    if store.url != embedded_server(config).url:
        raise RunExists(
            f"another run named {config.run.name!r} is on this server, or {folder} has lost its "
            "run.json, by which a folder knows its run",
            hint="choose another [run] name; or, if this folder is that run's, write the file "
            f'again: echo \'{{"nonce": "{nonce}"}}\' > {folder}/run.json',
        )
    log.warning("%s/run.json was lost, and is written again", folder)
    write_nonce(folder, nonce)


def maxmemory_bytes(store: Store) -> int:
    """Return the smallest maxmemory of the servers in bytes; 0 if none has one, or reports it."""
    found: list[int] = []
    for _, client in store.servers.masters():
        with suppress(NoPermissionError):
            found.append(int(client.info("memory").get("maxmemory", 0)))
    return min((size for size in found if size), default=0)


def wait_for_run(store: Store, name: str, *, timeout_s: float = 600.0) -> Run:
    """Open a run, and wait until it is created. Raises RunNotFound after `timeout_s`."""
    end = time.monotonic() + timeout_s
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
