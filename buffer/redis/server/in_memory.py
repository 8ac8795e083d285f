"""A server in this process, for tests: stores with the same memory:// URL share it.

It is fakeredis (extra `testing`), which runs the scripts of `lua/`, so no rule of the contract is
written twice. Nothing in it is durable.
"""

from __future__ import annotations

import threading
from functools import cache
from hashlib import sha1
from typing import Any

import numpy as np
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from buffer.errors import ConfigError
from buffer.imports import install_command

try:
    import lupa  # noqa: F401  without it, fakeredis can be imported but has no scripts
    from fakeredis import FakeRedisConnection, FakeServer
    from fakeredis._core import CommandItem
    from fakeredis._socket import FakeSocket
except ImportError as error:
    raise ConfigError(
        "memory:// needs fakeredis and Lua", hint=install_command("testing")
    ) from error

_servers: dict[str, FakeServer] = {}
_lock = threading.Lock()


def _sha1hex(text: bytes) -> bytes:
    return sha1(text, usedforsecurity=False).hexdigest().encode()


class _Runtime:
    """A Lua runtime that compiles each script once and leaves garbage collection to Lua.

    fakeredis does both in each call, and looks for new global variables at each command of a
    script. Real servers check that too, and every script of `lua/` runs on them.
    """

    def __init__(self, lua: Any) -> None:
        self.table_from = lua.table_from
        self.globals = dict
        self._compile = cache(lua.compile)

    def execute(self, code: bytes | str) -> Any:
        return None if code == "collectgarbage()" else self._compile(code)()


class _Socket(FakeSocket):
    """The server's end of a connection, with the commands that fakeredis 2.40 lacks."""

    def eval(self, script: bytes, numkeys: int, *keys_and_args: bytes) -> Any:
        self._server.script_cache[_sha1hex(script)] = script
        # the shebang of Redis 7 becomes a comment, so that errors name the right line
        plain = b"--" + script if script.startswith(b"#!") else script
        return super().eval(plain, numkeys, *keys_and_args)

    def _get_server_runtime(self, server: Any) -> Any:
        runtime = super()._get_server_runtime(server)
        if not isinstance(runtime, _Runtime):
            runtime.globals()[b"redis"][b"sha1hex"] = _sha1hex
            server._lua_runtime = _Runtime(runtime)
        return server._lua_runtime

    def _lua_redis_call(self, lua: Any, known: set[Any], name: bytes, *args: Any) -> Any:
        server: Any = self._server
        return super()._lua_redis_call(server._lua_runtime, known, name, *args)

    def bitcount(self, key: CommandItem, *span: bytes) -> int:
        is_in_bits = len(span) == 3 and span[2].lower() == b"bit" and min(map(int, span[:2])) >= 0
        if key.value is None or (span and not is_in_bits):
            return int(super().bitcount(key, *span))
        # fakeredis converts the bitmap to text: 0.1 s for the 4 MB of a task with imported groups
        bitmap = np.frombuffer(key.value, np.uint8)
        if not span:
            return int(np.bitwise_count(bitmap).sum())
        first, last = int(span[0]), int(span[1])
        bits = np.unpackbits(bitmap[first // 8 : last // 8 + 1])
        return int(bits[first % 8 :][: max(0, last - first + 1)].sum())


class _Connection(FakeRedisConnection):
    def _connect(self) -> FakeSocket:
        assert self._server is not None
        return _Socket(
            self._server, db=self.db, client_class=self._client_class, client_info=self._client_info
        )


class MemoryClient(redis.Redis):
    """A plain client that answers what `buffer.redis.server.check` asks for."""

    def info(self, section: str | None = None, *sections: str, **options: Any) -> dict[str, Any]:
        return {
            "redis_version": "7.0.0",
            "redis_mode": "memory",
            "role": "master",
            "loading": 0,
            "cluster_enabled": 0,
            "aof_enabled": 0,
            "maxmemory_policy": "noeviction",
        }


def open_memory(url: str, name: str) -> MemoryClient:
    with _lock:
        if url not in _servers:
            _servers[url] = FakeServer(version=(7, 0))
        server = _servers[url]
    retry = Retry(NoBackoff(), 0)
    pool = redis.ConnectionPool(
        _Connection, server=server, client_name=name, protocol=2, retry=retry
    )
    return MemoryClient(connection_pool=pool)
