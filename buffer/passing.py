"""Errors of a server that pass by themselves: what is tried again, and what is an answer."""

from __future__ import annotations

from redis.exceptions import (
    AskError,
    AuthenticationError,
    AuthorizationError,
    BusyLoadingError,
    ClusterDownError,
    ConnectionError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    ResponseError,
    TimeoutError,
    TryAgainError,
)

_KINDS = (
    ConnectionError,
    TimeoutError,
    BusyLoadingError,
    ReadOnlyError,
    OutOfMemoryError,
    AskError,  # and MOVED: not carried out, and the map of the slots is read again
    TryAgainError,
    ClusterDownError,
)
_WORDS = ("NOREPLICAS", "MISCONF", "BUSY", "UNBLOCKED", "LOADING")


def is_passing(error: Exception) -> bool:
    """Whether waiting may help: the server is away, starting, full or busy - not: it says no."""
    if isinstance(error, AuthenticationError | AuthorizationError | NoPermissionError):
        return False
    if isinstance(error, _KINDS):
        return True
    return isinstance(error, ResponseError) and str(error).startswith(_WORDS)
