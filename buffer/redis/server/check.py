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
from buffer.redis.eviction import ServerMemory
from buffer.redis.server.acl import is_of_role
from buffer.redis.url import Servers, mask_url

Level = Literal["ok", "warning", "error"]

OLDEST_REDIS = (7, 0)
OLDEST_VALKEY = (7, 2)
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


_UNREADABLE = ServerFinding(
    "warning",
    "INFO is forbidden for this user",
    "so the server's settings cannot be checked",
    "Allow it (ACL: +info), or make sure that it has noeviction, appendonly yes, "
    "appendfsync always",
)


def check_all(servers: Servers) -> list[ServerFinding]:
    """Return all findings, as `rolloutmq doctor` shows them; in a cluster, each names its node."""
    masters = servers.masters()
    if len(masters) == 1:
        return check_server(masters[0][1])
    return [
        replace(finding, what=f"{mask_url(url)}: {finding.what}")
        for url, client in masters
        for finding in check_server(client)
    ]


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
    return [*_usable(info), *_durable(info, client), *_room(info)]


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
    findings = list(_durable(info, client))
    decisive = [*_usable(info), *([] if allow_unsafe else findings)]
    if refused := [f"  {found}" for found in decisive if found.level == "error"]:
        raise StoreUnsafe("\n".join(["this server cannot hold a run:", *refused]))
    return [found for found in findings if found.level != "ok"]


def read_memory(servers: Servers) -> dict[str, ServerMemory]:
    """Return the memory of each server that holds keys, by its URL without password."""
    infos = {mask_url(url): _read_info(client) for url, client in servers.masters()}
    return {url: ServerMemory.of(info) for url, info in infos.items() if info is not None}


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


def _ok(what: str, why: str = "") -> ServerFinding:
    return ServerFinding("ok", what, why)


def _warning(what: str, why: str, fix: str) -> ServerFinding:
    return ServerFinding("warning", what, why, fix)


def _error(what: str, why: str, fix: str) -> ServerFinding:
    return ServerFinding("error", what, why, fix)


def _set(setting: str) -> str:
    return f"redis-cli CONFIG SET {setting} (and in its config file, to keep it)"


def _usable(info: Mapping[str, Any]) -> Iterator[ServerFinding]:
    """Yield what no setting can allow: the version, the role, and a server that is not ready."""
    kind, text, version = _version_of(info)
    if version >= (OLDEST_VALKEY if kind == "Valkey" else OLDEST_REDIS):
        yield _ok(f"{kind} {text}")
    else:
        needed = "Redis 7.0 or newer or Valkey 7.2 or newer"
        why = "the scripts need Redis 7.0 or Valkey 7.2"
        yield _error(f"{kind} {text} is too old", why, f"Use {needed}, {EMBEDDED_HINT}")
    mode = info.get("redis_mode")
    if mode == "sentinel":
        fix = f"Use the server it watches, {EMBEDDED_HINT}"
        yield _error("this is a Sentinel", "it holds no data", fix)
    if mode == "memory":
        why = "no other process can connect to it"
        yield _error("this is the memory of one process", why, f"Use a server, {EMBEDDED_HINT}")
    if info.get("cluster_state", "ok") != "ok":
        fix = "See redis-cli cluster info"
        yield _error("the cluster is down", "it does not serve all slots", fix)
    if info.get("role") == "slave":
        primary = f"{info.get('master_host')}:{info.get('master_port')}"
        yield _error("the server is a replica", "it refuses writes", f"Use its primary, {primary}")
    if info.get("loading"):
        yield _error("the server is still loading its data", "it answers no commands", "Wait")


def _version_of(info: Mapping[str, Any]) -> tuple[str, str, tuple[int, ...]]:
    """Return "Redis" or "Valkey", and its version as text and as (major, minor)."""
    is_valkey = "valkey_version" in info or info.get("server_name") == "valkey"
    # in Valkey, redis_version is a compatible Redis: 7.2.4 in all versions
    text = str(info.get("valkey_version" if is_valkey else "redis_version", "0"))
    version = tuple(int(part) for part in text.split(".")[:2] if part.isdigit())
    return "Valkey" if is_valkey else "Redis", text, version


def _durable(info: Mapping[str, Any], client: redis.Redis) -> Iterator[ServerFinding]:
    """Yield what could lose acknowledged work."""
    policy = str(info.get("maxmemory_policy", "unknown"))
    if policy == "noeviction":
        yield _ok("maxmemory-policy noeviction")
    else:
        why = "a full server would silently delete parts of the run"
        yield _error(f"maxmemory-policy {policy}", why, _set("maxmemory-policy noeviction"))
    if evicted := int(info.get("evicted_keys", 0)):
        yield _warning(
            f"{evicted} keys were evicted since the server was started",
            "parts of a run may be gone",
            "`rolloutmq fsck` tells; `rolloutmq run CONFIG --regenerate` makes a run again from "
            "its newest checkpoint",
        )
    if not info.get("aof_enabled"):
        why = "a restart of the server loses everything since its last snapshot, or everything"
        yield _error("the append-only file is off", why, _set("appendonly yes"))
        return
    if info.get("aof_last_write_status", "ok") != "ok":
        what = "the last write to the append-only file failed"
        yield _error(what, "the disk may be full", "See the server's log")
    yield _fsync(info, fsync_policy(client))


def _fsync(info: Mapping[str, Any], policy: str | None) -> ServerFinding:
    fix = _set("appendfsync always")
    what = f"appendfsync {policy}"
    if policy == "always":
        return _ok("appendonly yes, appendfsync always")
    if policy == "everysec":
        why = "a crash loses up to two seconds of acknowledged work: the checkpoint restores what "
        return _warning(what, f"{why}was trained, the rest is generated again", fix)
    if policy is not None:
        why = "a power failure loses up to half a minute of acknowledged work"
        return _error(what, why, fix)
    what = "CONFIG GET is forbidden for this user"
    kind, text, version = _version_of(info)
    if kind == "Valkey" or version >= (7, 2):  # it has WAITAOF
        return _ok(what, "appendfsync is not known, so each durable call waits for the disk")
    why = f"unless appendfsync is always, a crash of {kind} {text} loses acknowledged work"
    return _warning(what, why, "Ask its administrator: redis-cli CONFIG GET appendfsync")


def _room(info: Mapping[str, Any]) -> Iterator[ServerFinding]:
    """Yield what is nearly used up; not part of `require_safe`, as the run is safe."""
    memory = ServerMemory.of(info)
    if memory.is_full:
        yield _warning(
            str(memory),
            "nothing new is started; running groups can still be submitted, taken and committed",
            "Let the trainer write a checkpoint and commit, drop groups that are not needed, "
            "or raise maxmemory (CONFIG SET)",
        )
    most, used = int(info.get("maxclients", 0)), int(info.get("connected_clients", 0))
    if most and used >= 0.8 * most:  # a growing fleet may find no connection
        yield _warning(
            f"{used} of {most} connections (maxclients) are used",
            "the server refuses further ones; a worker keeps five",
            "Raise maxclients in the server's config, and the limit of open files (ulimit -n)",
        )
