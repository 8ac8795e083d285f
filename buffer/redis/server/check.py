"""Check whether a server may hold a run: version, role, and settings that could lose data.

Only settings that could lose data can be overruled (`redis.allow_unsafe`); a server that is too
old, a Sentinel or a replica cannot be used. In a cluster, every master is checked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import redis
from redis.exceptions import BusyLoadingError, ClusterDownError, NoPermissionError

from buffer.errors import StoreUnsafe
from buffer.redis.connection.nodes import Servers
from buffer.redis.connection.url import mask_url
from buffer.redis.server.acl import is_of_role

Level = Literal["ok", "warning", "error"]

FULL = 0.98
"""The share of maxmemory above which a call that needs room for a payload may be refused."""

MANY_CLIENTS = 0.8
"""The share of maxclients above which a growing fleet may find no connection."""

OLDEST_REDIS = (7, 0)
OLDEST_VALKEY = (7, 2)
OLDEST_WAITAOF = (7, 2)
EMBEDDED_HINT = "or leave the URL out: the run then starts an embedded Valkey"


@dataclass(frozen=True, slots=True)
class ServerFinding:
    """One checked property: what it is, why it matters, and how to fix it ("" if it is fine)."""

    level: Level
    what: str
    why: str = ""
    fix: str = ""

    def __str__(self) -> str:
        finding = f"{self.what}: {self.why}" if self.why else self.what
        return f"{finding}. {self.fix}" if self.fix else finding


def check_all(servers: Servers) -> list[ServerFinding]:
    """Return all findings, as `rolloutmq doctor` shows them; in a cluster, each names its node."""
    masters = servers.masters()
    if len(masters) == 1:
        return check_server(masters[0][1])
    found = [
        (mask_url(url), finding) for url, client in masters for finding in check_server(client)
    ]
    return [replace(finding, what=f"{node}: {finding.what}") for node, finding in found]


def require_all_safe(servers: Servers, allow_unsafe: bool = False) -> list[ServerFinding]:
    """Run `require_safe` on every server that holds keys, and return each warning once."""
    found = [
        finding for _, client in servers.masters() for finding in require_safe(client, allow_unsafe)
    ]
    return list(dict.fromkeys(found))


def check_server(client: redis.Redis) -> list[ServerFinding]:
    """Return the findings about one server. Raises redis.RedisError."""
    info = _read_info(client)
    if info is None:
        return [_UNREADABLE]
    return [*_check_usable(info), *_check_durable(info, client), *_check_room(info)]


@dataclass(frozen=True, slots=True)
class ServerMemory:
    """Bytes that a server uses, and its `maxmemory`; 0: it has no limit."""

    used: int
    limit: int

    @classmethod
    def of(cls, info: Mapping[str, Any]) -> ServerMemory:
        return cls(int(info.get("used_memory", 0)), int(info.get("maxmemory", 0)))


def read_memory(servers: Servers) -> dict[str, ServerMemory]:
    """Return the memory of each server that holds keys, by its URL without password."""
    infos = {mask_url(url): _read_info(client) for url, client in servers.masters()}
    return {url: ServerMemory.of(info) for url, info in infos.items() if info is not None}


def require_safe(client: redis.Redis, allow_unsafe: bool = False) -> list[ServerFinding]:
    """Return the warnings about a server. Raises StoreUnsafe if it cannot hold a run.

    `allow_unsafe` only permits settings that could lose data. Raises BusyLoadingError while the
    server loads its data, ClusterDownError while its cluster does not serve all slots.
    """
    info = _read_info(client)
    if info is None:
        return [_UNREADABLE]
    if info.get("loading"):
        raise BusyLoadingError
    if info.get("cluster_state", "ok") != "ok":
        raise ClusterDownError("CLUSTERDOWN")
    refused = [found for found in _check_usable(info) if found.level == "error"]
    findings = list(_check_durable(info, client))
    if not allow_unsafe:
        refused += [found for found in findings if found.level == "error"]
    if refused:
        raise StoreUnsafe(
            "this server cannot hold a run:\n" + "\n".join(f"  {found}" for found in refused)
        )
    return [found for found in findings if found.level != "ok"]


def _read_info(client: Any) -> dict[str, Any] | None:
    try:
        info = dict(client.info())
    except NoPermissionError:
        return None
    if info.get("redis_mode") == "cluster":
        info["cluster_state"] = client.execute_command("CLUSTER INFO")["cluster_state"]
    return info


def fsync_policy(client: redis.Redis) -> str | None:
    """Return `appendfsync`, which INFO lacks; None if an ACL or the host forbids CONFIG GET.

    Users of `rolloutmq acl` do not ask: CONFIG GET would tell them the server's passwords, too.
    """
    if is_of_role(str(client.connection_pool.connection_kwargs.get("username") or "")):
        return None
    try:
        (policy,) = client.config_get("appendfsync").values()
    except redis.ResponseError:
        return None
    return policy.decode() if isinstance(policy, bytes) else str(policy)


_UNREADABLE = ServerFinding(
    "warning",
    "INFO is forbidden for this user",
    "so the server's settings cannot be checked",
    "Allow it (ACL: +info), or make sure that it has noeviction, appendonly yes, "
    "appendfsync always",
)


def _check_usable(info: Mapping[str, Any]) -> Iterator[ServerFinding]:
    yield _check_version(info)
    if info.get("redis_mode") == "sentinel":
        yield ServerFinding(
            "error",
            "this is a Sentinel",
            "it holds no data",
            f"Use the server it watches, {EMBEDDED_HINT}",
        )
    if info.get("redis_mode") == "memory":
        yield ServerFinding(
            "error",
            "this is the memory of one process",
            "no other process can connect to it",
            f"Use a server, {EMBEDDED_HINT}",
        )
    if info.get("cluster_state", "ok") != "ok":
        yield ServerFinding(
            "error",
            "the cluster is down",
            "it does not serve all slots",
            "See redis-cli cluster info",
        )
    if info.get("role") == "slave":
        yield ServerFinding(
            "error",
            "the server is a replica",
            "it refuses writes",
            f"Use its primary, {info.get('master_host')}:{info.get('master_port')}",
        )
    if info.get("loading"):
        yield ServerFinding(
            "error",
            "the server is still loading its data",
            "it answers no commands yet",
            "Wait a moment",
        )


def _version_of(info: Mapping[str, Any]) -> tuple[str, str, tuple[int, ...]]:
    """Return "Redis" or "Valkey", and its version as text and as (major, minor)."""
    is_valkey = "valkey_version" in info or info.get("server_name") == "valkey"
    # in Valkey, redis_version is a compatible Redis: 7.2.4 in all versions
    text = str(info.get("valkey_version" if is_valkey else "redis_version", "0"))
    version = tuple(int(part) for part in text.split(".")[:2] if part.isdigit())
    return "Valkey" if is_valkey else "Redis", text, version


def _check_version(info: Mapping[str, Any]) -> ServerFinding:
    kind, text, version = _version_of(info)
    if version >= (OLDEST_VALKEY if kind == "Valkey" else OLDEST_REDIS):
        return ServerFinding("ok", f"{kind} {text}")
    return ServerFinding(
        "error",
        f"{kind} {text} is too old",
        "the scripts need Redis 7.0 or Valkey 7.2",
        f"Use Redis 7.0 or newer or Valkey 7.2 or newer, {EMBEDDED_HINT}",
    )


def _check_durable(info: Mapping[str, Any], client: redis.Redis) -> Iterator[ServerFinding]:
    yield _check_eviction(str(info.get("maxmemory_policy", "unknown")))
    if evicted := int(info.get("evicted_keys", 0)):
        yield ServerFinding(
            "warning",
            f"{evicted} keys were evicted since the server was started",
            "parts of a run may be gone",
            "`rolloutmq fsck` tells; `rolloutmq run CONFIG --regenerate` makes a run again from "
            "its newest checkpoint",
        )
    if not info.get("aof_enabled"):
        yield ServerFinding(
            "error",
            "the append-only file is off",
            "a restart of the server loses everything since its last snapshot, or everything",
            "redis-cli CONFIG SET appendonly yes (and in its config file, to keep it)",
        )
        return
    if info.get("aof_last_write_status", "ok") != "ok":
        yield ServerFinding(
            "error",
            "the last write to the append-only file failed",
            "the disk may be full",
            "See the server's log",
        )
    policy = fsync_policy(client)
    yield _unknown_fsync(info) if policy is None else _check_fsync(policy)


def _check_room(info: Mapping[str, Any]) -> Iterator[ServerFinding]:
    """Yield what is nearly used up; not part of `require_safe`, as the run is safe."""
    memory = ServerMemory.of(info)
    if memory.limit and memory.used >= FULL * memory.limit:
        yield ServerFinding(
            "warning",
            f"the server is full: {memory.used / 2**20:.0f} of {memory.limit / 2**20:.0f} MiB "
            "maxmemory are used",
            "nothing new is started; running groups can still be submitted, taken and committed",
            "Let the trainer write a checkpoint and commit, drop groups that are not needed, "
            "or raise maxmemory (CONFIG SET)",
        )
    most, used = int(info.get("maxclients", 0)), int(info.get("connected_clients", 0))
    if most and used >= MANY_CLIENTS * most:
        yield ServerFinding(
            "warning",
            f"{used} of {most} connections (maxclients) are used",
            "the server refuses further ones; a worker keeps five",
            "Raise maxclients in the server's config, and the limit of open files (ulimit -n)",
        )


def _check_eviction(policy: str) -> ServerFinding:
    if policy == "noeviction":
        return ServerFinding("ok", "maxmemory-policy noeviction")
    return ServerFinding(
        "error",
        f"maxmemory-policy {policy}",
        "a full server would silently delete parts of the run",
        "redis-cli CONFIG SET maxmemory-policy noeviction (and in its config file, to keep it)",
    )


def _unknown_fsync(info: Mapping[str, Any]) -> ServerFinding:
    what = "CONFIG GET is forbidden for this user"
    kind, text, version = _version_of(info)
    if kind == "Valkey" or version >= OLDEST_WAITAOF:
        return ServerFinding(
            "ok", what, "appendfsync is not known, so each durable call waits for the disk"
        )
    return ServerFinding(
        "warning",
        what,
        f"unless appendfsync is always, a crash of {kind} {text} loses acknowledged work",
        "Ask the server's administrator: redis-cli CONFIG GET appendfsync",
    )


def _check_fsync(policy: str) -> ServerFinding:
    fix = "redis-cli CONFIG SET appendfsync always (and in its config file, to keep it)"
    if policy == "always":
        return ServerFinding("ok", "appendonly yes, appendfsync always")
    if policy == "everysec":
        return ServerFinding(
            "warning",
            "appendfsync everysec",
            "a crash loses up to two seconds of acknowledged work: the checkpoint restores "
            "what was trained, the rest is generated again",
            fix,
        )
    return ServerFinding(
        "error",
        f"appendfsync {policy}",
        "a power failure loses up to half a minute of acknowledged work",
        fix,
    )
