"""Explain errors of the Redis client: what is wrong at which address, and what to do."""

from __future__ import annotations

import re

import redis
from redis.exceptions import NoPermissionError, OutOfMemoryError, ResponseError

from buffer.errors import (
    LostRun,
    RolloutMQError,
    RunDamaged,
    ScriptError,
    StoreError,
    StoreFull,
    StoreUnavailable,
)
from buffer.redis.key_fields import HINT
from buffer.redis.retry import NotDurable
from buffer.redis.url import mask_url

_NOT_TLS = ("wrong version number", "wrong_version_number", "record layer failure")
_BAD_HOST = ("name or service not known", "nodename nor servname", "name resolution", "no address")
_BAD_LOGIN = ("wrongpass", "invalid username-password", "invalid password", "without any password")
_FORBIDDEN = ("noperm", "no permissions", "acl failure in script", "the user executing the script")

_REASONS: tuple[tuple[tuple[str, ...], type[StoreError], str, str], ...] = (
    # (words of the client or the server, error, what happened, what to do); the first match wins
    (("masternotfounderror",), StoreUnavailable, "no Sentinel names a primary of this service",
     "check hosts, ports and service in the URL, and whether the Sentinels need "
     "?sentinel_username= and &sentinel_password="),
    (("af_unix path too long",), StoreError, "the path of the socket is too long for this system",
     "use a path of at most 100 characters"),
    (_BAD_LOGIN, StoreError, "the server refuses the user or password",
     "check user and password in the URL: redis://user:password@host:6379/0"),
    (("noauth", "authentication required", "hello must be called"), StoreError,
     "the server requires a password", "put it in the URL: redis://:password@host:6379/0"),
    (_FORBIDDEN, StoreError, "the server's ACL forbids this user a command or key that a run needs",
     "use the user of a role that may: `rolloutmq acl` prints them"),
    (("noscript",), StoreUnavailable,
     "the server has not the scripts of this version, and this user may not load them",
     "they are loaded by trainer, producer and operator: start one, of the same version"),
    ((*_NOT_TLS, "unexpected eof"), StoreError, "the server does not use TLS at this port",
     "use redis:// instead of rediss://, or the server's TLS port"),
    (("certificate", "ssl", "tls"), StoreError, "TLS with the server failed",
     "for an authority of your own, add ?ssl_ca_certs=/path/ca.pem; the certificate must name "
     "the host"),
    (_BAD_HOST, StoreUnavailable, "this host name is not known", "check the host in the URL"),
    (("no such file or directory",), StoreUnavailable, "there is no such socket",
     "start the server, or check the path in the URL"),
    (("permission denied",), StoreError, "this user may not open the socket",
     "use the server's user, or set unixsocketperm"),
    (("refused",), StoreUnavailable, "no server listens there",
     "start the server, or check host and port in the URL"),
    (("timeout", "timed out"), StoreUnavailable, "no answer in time",
     "check host, port and firewall, and whether the server requires TLS (rediss://) or not "
     "(redis://)"),
    (("protocol error",), StoreError, "what answers there is not a Redis server",
     "check host and port in the URL; a TLS server needs rediss://"),
    (("connection closed", "reset by peer"), StoreUnavailable, "the server closes the connection",
     "use rediss:// for a TLS server, redis:// for others; or see the server's log"),
    (("db index", "invalid db"), StoreError, "the server has no such database",
     "end the URL with /0"),
    (("max number of clients",), StoreUnavailable, "the server has too many clients",
     "raise its maxclients"),
    (("clusterdown",), StoreUnavailable, "the cluster is down: it does not serve all slots",
     "see redis-cli cluster info"),
    (("loading",), StoreUnavailable, "the server is still loading its data",
     "try again in a moment"),
)  # fmt: skip


_UNKNOWN = re.compile(r"unknown (?:sub|redis )?command(?: called|,? ['`\"]?(\w+))?", re.IGNORECASE)


def is_acl_failure(text: str) -> bool:
    """Return whether a script was refused a command or key; Redis 7.0 words it differently."""
    return "ACL failure in script" in text or "The user executing the script" in text


def describe_connection_error(url: str, error: Exception) -> StoreError:
    """Return an error of the client as a StoreError with a hint. Passwords are masked."""
    words = f"{type(error).__name__} {error}".lower()
    where = mask_url(url)
    if isinstance(error, NotDurable):
        return StoreUnavailable(f"{where}: {error}", hint="see its disk and its replicas")
    if found := _UNKNOWN.search(str(error)):
        name = f"the command {found[1].upper()}" if found[1] else "a command of a script"
        return StoreError(
            f"{where}: the server does not know {name}, which a run needs",
            hint="remove the rename-command of it from the server's settings, or use a server that "
            "has all commands; to forbid some, give each role a user (`rolloutmq acl`)",
        )
    for signs, kind, what, hint in _REASONS:
        if any(sign in words for sign in signs):
            return kind(f"{where}: {what}", hint=hint)
    return StoreUnavailable(f"{where}: {type(error).__name__}: {mask_url(str(error))}")


def lost_run(why: str) -> LostRun:
    """Return what to raise for a call for a run that was there; it changed nothing."""
    return LostRun(
        f"the server no longer holds this run: it was removed, or its data was lost ({why})",
        hint="if it was lost, create it again (Run.create), open a trainer with regenerate=True "
        "and the position of the newest checkpoint, then start the other processes again",
        command_hint="if it was lost, `rolloutmq train CONFIG --regenerate` continues from the "
        "newest checkpoint; then start the other processes again",
    )


def refusal(url: str, what: str, error: redis.RedisError) -> RolloutMQError:
    """Return what to raise for an operation that no further attempt would help."""
    text = str(error)
    if text.startswith("RMQ_ARG "):
        return ScriptError(f"{text.removeprefix('RMQ_ARG ')}; nothing was changed")
    if text.startswith("RMQ_GONE "):
        return lost_run(text.partition(" ")[2])
    if "WRONGTYPE" in text:
        return RunDamaged(f"{what}: a key of the run is of another type", hint=HINT)
    if _UNKNOWN.search(text):  # the command was renamed, or is not offered
        described = describe_connection_error(url, error)
        return StoreError(f"{what}: {described.message}", hint=described.hint)
    if type(error) is ResponseError and "user_script" in text and not is_acl_failure(text):
        # a script failed on a field that is missing, or that is no number
        return RunDamaged(f"{what}: {text[:300]}", hint=HINT)
    # only errors about users: another one is a bug, and its words could fit any description
    is_about_user = isinstance(error, redis.ConnectionError | NoPermissionError)
    is_about_user = is_about_user or is_acl_failure(text)
    hint = describe_connection_error(url, error).hint if is_about_user else ""
    return StoreError(f"{what}: the server refused: {error}", hint=hint)


def given_up(url: str, what: str, error: redis.RedisError) -> StoreUnavailable:
    """Return what to raise for an operation whose time is over."""
    server = mask_url(url)
    if isinstance(error, OutOfMemoryError):
        return StoreFull(
            f"{what}: the memory of {server} is full",
            hint="training and committing batches frees memory; "
            "or raise maxmemory, or lower [memory] budget_bytes",
        )
    described = describe_connection_error(url, error)
    return StoreUnavailable(f"{what}: {described.message}", hint=described.hint)
