"""The URL of a server, clients for it, and the node of a cluster that holds a key.

    redis://[user:password@]host:port/0   rediss://…         one server, or any node of a cluster
    unix://[user:password@]/path                             one server on this machine
    redis://[…@]host1:port,host2:port,host3:port/0           a cluster, by any of these nodes
    redis+sentinel://[…@]host1:port,host2:port/service[/0]   the primary of these Sentinels
    rediss+sentinel://…                                      the same with TLS
    memory://  memory://name                                 inside this process, for tests only

User and password are the server's; those of Sentinels are `?sentinel_username=` and
`&sentinel_password=`. Of redis-py's options, only OPTIONS may follow `?`. Mask every URL before it
is logged, shown or put into an error, since it may hold a password.
"""

from __future__ import annotations

import re
import threading
from typing import Any
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

import redis
from redis.backoff import NoBackoff
from redis.connection import parse_url
from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot
from redis.exceptions import ConnectionError, NoPermissionError, RedisError, TimeoutError
from redis.retry import Retry
from redis.sentinel import Sentinel

from buffer.errors import ConfigError
from buffer.redis.retry import SYSTEM_RANDOM

_WORD = re.compile(r"[^\s'\"]+")
# the "//" behind a scheme; a URL with a missing or misspelled scheme may hold a password as well
_COLON = re.compile(r":(?!//)")
_NAMED = re.compile(r"[?&](?:password|ssl_password|sentinel_password)=", re.IGNORECASE)
_QUERY = re.compile(rf"({_NAMED.pattern})[^&\s'\"]+", re.IGNORECASE)


def mask_url(text: str) -> str:
    """Return the text with `***` for every password of a URL in it, in one pass over it."""
    return _QUERY.sub(r"\1***", _WORD.sub(_mask_user_info, text))


def _mask_user_info(word: re.Match[str]) -> str:
    """Mask the password up to the last "@": it may hold unescaped ":" and "@"."""
    text = word[0]
    colon = _COLON.search(text)
    end = text.rfind("@")
    if colon is None or end < colon.end():
        return text
    # an "@" behind the name of a password may end the user information, or belong to that password
    named = _NAMED.search(text, colon.end())
    rest = "" if named and named.end() <= end else text[end:]
    return f"{text[: colon.start()]}:***{rest}"


OPTIONS = frozenset(
    (
        *("db", "username", "password", "sentinel_username", "sentinel_password"),
        *("ssl_ca_certs", "ssl_ca_path", "ssl_ca_data", "ssl_certfile", "ssl_keyfile"),
        *("ssl_password", "ssl_cert_reqs", "ssl_check_hostname", "ssl_min_version", "ssl_ciphers"),
    )
)
"""Options that a URL may have. Others of redis-py change the types of replies, repeat commands
(I13), or replace the time-outs on which leases depend.
"""

SCHEMES = ("redis", "rediss", "unix", "redis+sentinel", "rediss+sentinel")

SOCKET_TIMEOUT_S = 15.0  # longer than any script runs, shorter than a lease lasts

_CONNECT_TIMEOUT_S = 5.0
_SENTINEL_TIMEOUT_S = 2.0


def open_client(
    url: str, *, name: str = "rolloutmq", timeout_s: float = SOCKET_TIMEOUT_S
) -> redis.Redis:
    """Return a client that connects lazily and never retries. Raises ConfigError for a bad URL."""
    if url.startswith("memory:"):
        from buffer.redis.server.in_memory import open_memory

        return open_memory(url, name)
    settings: dict[str, Any] = {
        "client_name": name,
        "socket_timeout": timeout_s,
        "socket_connect_timeout": _CONNECT_TIMEOUT_S,
        "health_check_interval": 0,
        "retry": Retry(NoBackoff(), 0),
        "retry_on_timeout": False,
    }
    if not url.startswith("unix"):
        settings["socket_keepalive"] = True
    _check_options(url)
    try:
        if "\0" in unquote(url):
            raise ValueError("NUL")
        client = (
            _primary(url, settings)
            if "+sentinel://" in url
            else redis.Redis.from_url(url, **settings)
        )
        options = client.connection_pool.connection_kwargs
        # an unknown option raises TypeError here, not only at the first command
        client.connection_pool.connection_class(**options)
        # also for an invalid host, and a socket without a path
        str(options.get("host", "")).encode("idna")
        if url.startswith("unix") and not options.get("path"):
            raise ValueError("no path")
    except (ValueError, TypeError):
        # `from None`: its message may hold a part of the password
        raise ConfigError(
            f"this is no URL of a Redis server: {mask_url(url)}",
            hint="redis://[user:password@]host:port/0, unix:///path or "
            "redis+sentinel://host:port,host:port/service; "
            "write special characters of a password as %XX",
        ) from None
    return client


def _check_options(url: str) -> None:
    """Raise ConfigError for the first option that is not in OPTIONS."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return  # refused as no URL
    # with an "@", it is the rest of a password that is not escaped, and must not be shown
    named = [] if "@" in parts.query else parse_qsl(parts.query, keep_blank_values=True)
    tls = parts.scheme.startswith("rediss")
    sentinel = parts.scheme.endswith("+sentinel")
    for name, _ in named:
        if name not in OPTIONS:
            what = "is none that a run works with"
        elif name.startswith("ssl_") and not tls:
            what = "needs a URL that begins with rediss://"
        elif name.startswith("sentinel_") and not sentinel:
            what = "needs a URL that begins with redis+sentinel://"
        else:
            continue
        raise ConfigError(
            f"the option {name[:60]!r} of the server's URL {what}: {mask_url(url)}",
            hint=f"remove it; the options are {', '.join(sorted(OPTIONS))}",
        )


def _primary(url: str, settings: dict[str, Any]) -> redis.Redis:
    """Return a client that asks Sentinels for the primary at each connect. Raises ValueError."""
    parts = urlsplit(url)
    credentials, hosts = _netloc(parts)
    service, _, database = parts.path.strip("/").partition("/")
    if not service:
        raise ValueError("no service")
    plain = parts.scheme.removesuffix("+sentinel")
    login = parse_url(f"{plain}://{credentials}host/{database or 0}?{parts.query}")  # type: ignore[no-untyped-call]
    of_sentinels = {name: login.pop(f"sentinel_{name}", None) for name in ("username", "password")}
    if login.pop("connection_class", None):  # TLS
        login["ssl"] = True
    del login["host"]
    sentinels = [urlsplit(f"//{host}") for host in hosts]
    patience = {
        "socket_timeout": _SENTINEL_TIMEOUT_S,
        "socket_connect_timeout": _SENTINEL_TIMEOUT_S,
    }
    tls = {name: value for name, value in login.items() if name.startswith("ssl")}
    watch = Sentinel(  # type: ignore[no-untyped-call]
        [(host.hostname or "", host.port or 26379) for host in sentinels],
        sentinel_kwargs={**patience, **of_sentinels, **tls, "retry": Retry(NoBackoff(), 0)},
    )
    primary: _Primary = watch.master_for(service, _Primary, **settings, **login)  # type: ignore[no-untyped-call]
    return primary


class _Primary(redis.Redis):
    def close(self) -> None:
        """Close all connections; the library leaves those to Sentinels open."""
        super().close()
        pool: Any = self.connection_pool
        pool.sentinel_manager.close()


def seeds(url: str) -> list[str]:
    """Return one URL for each node that a URL names; Sentinels are not nodes."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return [url]  # `open_client` raises ConfigError for it
    credentials, hosts = _netloc(parts)
    if len(hosts) == 1 or parts.scheme.endswith("+sentinel"):
        return [url]
    return [parts._replace(netloc=credentials + host).geturl() for host in hosts]


def at_node(url: str, host: bytes | str | None, port: int) -> str:
    """Return the URL of another node of the same cluster; without a host, it has that of `url`."""
    parts = urlsplit(url)
    credentials, _ = _netloc(parts)
    host = host.decode() if isinstance(host, bytes) else host
    host = host or parts.hostname or ""
    return parts._replace(
        netloc=f"{credentials}{f'[{host}]' if ':' in host else host}:{port}"
    ).geturl()


def _netloc(parts: SplitResult) -> tuple[str, list[str]]:
    credentials, at, hosts = parts.netloc.rpartition("@")
    return credentials + at, hosts.split(",")


class Servers:
    """Finds the client of the server that holds a key. Thread-safe; connects lazily.

    Each call has a connection of its own, so that a large payload never delays a heartbeat.

    In a cluster, a plain client uses each key at its own node, so that scripts, WATCH, blocking
    calls, WAITAOF and pub/sub work as on one server. redis-py's cluster client repeats commands of
    pipelines whose connection broke, even without a retry policy (I13). A slot that moves causes a
    transient error: `Store` waits and reads the slot map again.
    """

    def __init__(self, url: str, name: str, *, timeout_s: float = SOCKET_TIMEOUT_S) -> None:
        self._name = name
        self._timeout_s = timeout_s
        self._seeds = seeds(url)
        self._nodes = list(self._seeds)
        self._clients: dict[str, redis.Redis] = {}
        self._lock = threading.RLock()
        self.is_closed = False
        self._slots: list[str] | None = None
        self._allocator: str | None = None
        for seed in self._seeds:  # raises ConfigError for a bad URL
            self._client(seed)

    def client(self, key: str = "") -> Any:
        """Return the client of the server with `key`, or of the first. Raises redis.RedisError."""
        # Any: redis-py types its replies as unions over all protocols, which only their readers
        # can narrow
        url = self.url_of(key) if key else self._seeds[0]
        return self._clients.get(url) or self._client(url)

    def url_of(self, key: str) -> str:
        """Return the URL of the server that holds `key`. Raises redis.RedisError."""
        slots = self._slots  # read once: another thread may forget them
        slots = self._map() if slots is None else slots
        url = slots[key_slot(key.encode())] if slots else self._seeds[0]
        if not url:
            raise ConnectionError(f"no node of the cluster serves the slot of {key}")
        return url

    @property
    def is_cluster(self) -> bool:
        """Return whether the server is a cluster; it is asked once. Raises redis.RedisError."""
        return bool(self._map())

    @property
    def has_size_classes(self) -> bool:
        """Return whether the server's allocator is jemalloc, as far as it tells.

        It is asked once. A server that hides its allocator, or refuses INFO, counts as one with
        jemalloc, with which Redis and Valkey are built on Linux. After a move to a server with
        another allocator, values are cut for the old one until this process ends: readers accept
        any cut.
        """
        if self._allocator is None:
            try:
                found = self.client().info("memory")
            except (ConnectionError, TimeoutError):
                return True  # a server that does not answer is asked again
            except RedisError:
                found = {}
            self._allocator = str(found.get("mem_allocator", "jemalloc"))
        return self._allocator.startswith("jemalloc")

    def masters(self) -> list[tuple[str, Any]]:
        """Return (URL, client) of every server that holds keys. Raises redis.RedisError."""
        urls = sorted(set(self._map()) - {""}) or self._seeds[:1]
        return [(url, self._client(url)) for url in urls]

    def forget_slots(self) -> None:
        with self._lock:
            if self._slots:
                self._slots = None

    def close(self) -> None:
        self.is_closed = True
        with self._lock:
            for client in self._clients.values():
                client.close()

    def _client(self, url: str) -> redis.Redis:
        with self._lock:
            if url not in self._clients:
                self._clients[url] = open_client(url, name=self._name, timeout_s=self._timeout_s)
            return self._clients[url]

    def _map(self) -> list[str]:
        """Return the URL of each slot's master ("": none); an empty list outside a cluster."""
        with self._lock:
            if self._slots is None:
                self._slots = self._ask()
            return self._slots

    def _ask(self) -> list[str]:
        # all nodes that were ever seen, in random order: a node that is cut off from the others has
        # an old map, and must not be asked every time
        urls = SYSTEM_RANDOM.sample(self._nodes, len(self._nodes))
        for url in urls[:-1]:
            try:
                return self._slots_seen_by(url)
            except (ConnectionError, TimeoutError):
                continue
        return self._slots_seen_by(urls[-1])

    def _slots_seen_by(self, url: str) -> list[str]:
        client: Any = self._client(url)
        if not url.startswith(("redis:", "rediss:")):
            return []  # a Unix socket, or a primary that Sentinels name
        try:
            is_cluster = client.info("cluster").get("cluster_enabled")
        except NoPermissionError:
            is_cluster = False
        if not is_cluster:
            return []
        slots = [""] * REDIS_CLUSTER_HASH_SLOTS
        for first, last, *owners in client.execute_command("CLUSTER SLOTS"):
            master, *replicas = [at_node(url, host, port) for host, port, *_ in owners]
            slots[first : last + 1] = [master] * (last - first + 1)
            self._nodes += [node for node in (master, *replicas) if node not in self._nodes]
        return slots
