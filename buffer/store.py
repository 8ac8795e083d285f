"""The connection to the server: who retries what, and how a script is called.

The client library's own retries are off (they would run a script again whose reply was lost). `Store`
retries by itself, with full jitter and a deadline, and only operations that are harmless when repeated: every
script has a natural key (I13), and payload keys are written once under a token of their own.
One connection pool is for control, one for bulk, so that a large payload never delays a heartbeat.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import redis
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    BusyLoadingError,
    ConnectionError,
    NoPermissionError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    ResponseError,
    TimeoutError,
)
from redis.retry import Retry

from buffer.errors import ConfigError, StoreError, StoreUnavailable
from buffer.masking import mask_url
from buffer.scripts import Arg, library

log = logging.getLogger("rolloutmq.store")
T = TypeVar("T")

SOCKET_TIMEOUT_S = 15.0
"""Longer than any script or slice runs; shorter than a lease's patience."""

_PASSING = ("MASTERDOWN", "NOREPLICAS", "MISCONF", "BUSY", "UNBLOCKED", "TRYAGAIN", "CLUSTERDOWN", "LOADING")


def is_passing(error: Exception) -> bool:
    """Whether waiting may help: the server is away, starting, full or busy - not: it says no."""
    if isinstance(error, AuthenticationError | AuthorizationError | NoPermissionError):
        return False
    kinds = (ConnectionError, TimeoutError, BusyLoadingError, ReadOnlyError, OutOfMemoryError)
    if isinstance(error, kinds):
        return True
    return isinstance(error, ResponseError) and str(error).startswith(_PASSING)


def open_client(url: str, *, name: str = "rolloutmq", timeout_s: float = SOCKET_TIMEOUT_S) -> redis.Redis:
    """A client that retries nothing by itself. Connects lazily; raises nothing here but ConfigError for a bad URL."""
    tcp: dict[str, Any] = {} if url.startswith("unix") else {"socket_keepalive": True}
    try:
        client: redis.Redis = redis.Redis.from_url(
            url,
            client_name=name,
            socket_timeout=timeout_s,
            socket_connect_timeout=5.0,
            health_check_interval=0,
            retry=Retry(NoBackoff(), 0),
            retry_on_timeout=False,
            **tcp,
        )
    except ValueError:
        # its message may hold a part of the password
        raise ConfigError(
            f"this is no URL of a Redis server: {mask_url(url)}",
            hint="redis://[user:password@]host:port/0 or unix:///path; write special characters of a password as %XX",
        ) from None
    return client


class Store:
    """One server, seen by one process. Thread-safe.

    `deadline_s` bounds how long one operation is tried; `StoreUnavailable` says that it passed.
    """

    def __init__(self, url: str, *, name: str = "rolloutmq", deadline_s: float = 60.0) -> None:
        self.url = url
        self.name = name
        self.deadline_s = deadline_s
        # redis-py types its replies as unions of all protocols: they are told apart where they are read
        self.control: Any = open_client(url, name=name)
        self.bulk: Any = open_client(url, name=f"{name}-bulk")
        self._bells: Any = open_client(url, name=f"{name}-bells")
        self.waits_for_disk = False
        self.retries = 0
        self._away = False

    def close(self) -> None:
        self.control.close()
        self.bulk.close()
        self._bells.close()

    def call(
        self,
        script: str,
        keys: Mapping[str, str],
        args: Mapping[str, Arg],
        tail_keys: Sequence[str] = (),
        tail_args: Sequence[Arg] = (),
        *,
        durable: bool = False,
    ) -> list[Any]:
        """Run a script by name; the reply's strings are decoded. Retried until the deadline (I13).

        With `durable`, the answer is given once the change is on the server's disk (I6).
        """
        entry = library()[script]
        all_keys, all_args = entry.arrange(keys, args, tail_keys, tail_args)
        wait = durable and self.waits_for_disk

        def run() -> list[Any]:
            try:
                return self._evaluate("EVALSHA", entry.sha, all_keys, all_args, wait)
            except NoScriptError:
                return self._evaluate("EVAL", entry.source, all_keys, all_args, wait)

        reply = self.retrying(script, run)
        return [item.decode() if isinstance(item, bytes) else item for item in reply]

    def _evaluate(self, verb: str, script: str, keys: list[str], args: list[Arg], wait: bool) -> list[Any]:
        client: Any = self.control
        if not wait:
            return list(client.execute_command(verb, script, len(keys), *keys, *args))
        # WAITAOF speaks of the writes of its own connection, so both go through one pipeline
        pipe = client.pipeline(transaction=False)
        pipe.execute_command(verb, script, len(keys), *keys, *args)
        pipe.execute_command("WAITAOF", 1, 0, 5000)
        reply, (on_disk, _) = pipe.execute()
        if not on_disk:
            raise TimeoutError(f"{verb} is not on the server's disk after 5 s")
        return list(reply)

    def wait_bell(self, bell: str, timeout_s: float, *, shared: bool = False) -> bool:
        """Block until `bell` rings or the time is up. Whether it rang; a lost ring costs one time-out.

        The bell is cleared before the caller looks at what it was rung for, so a later ring is never lost. Of
        a `shared` bell, every listener takes one ring.
        """

        def listen() -> bool:
            # never 0 (for ever), never near the socket's own time-out
            rang = self._bells.blpop([bell], timeout=min(max(timeout_s, 0.01), SOCKET_TIMEOUT_S / 3))
            if rang and not shared:
                self._bells.delete(bell)
            return bool(rang)

        return self.retrying("bell", listen)

    def retrying(self, what: str, operation: Callable[[], T], *, deadline_s: float | None = None) -> T:
        """Run `operation`, again and again while the server is away, until it works or the deadline passes."""
        end = time.monotonic() + (self.deadline_s if deadline_s is None else deadline_s)
        for attempt in range(1_000_000):
            try:
                result = operation()
            except redis.RedisError as error:
                self._wait(what, error, attempt, end)
            else:
                self._note_back()
                return result
        raise StoreUnavailable(f"{what}: gave up")  # pragma: no cover

    def _wait(self, what: str, error: redis.RedisError, attempt: int, end: float) -> None:
        if not is_passing(error):
            raise StoreError(f"{what}: the server refused: {error}") from error
        left = end - time.monotonic()
        if left <= 0:
            raise StoreUnavailable(
                f"{what}: no usable answer from {mask_url(self.url)}: {error}",
                hint="is the server running? everything continues by itself once it is back",
            ) from error
        if not self._away:
            log.warning("server away: %s during %s; waiting for it", error, what)
            self._away = True
        self.retries += 1
        time.sleep(min(left, random.uniform(0.0, min(2.0, 0.05 * 2.0 ** min(attempt, 10)))))

    def _note_back(self) -> None:
        if self._away:
            log.warning("server back")
            self._away = False
