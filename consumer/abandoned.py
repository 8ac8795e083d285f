"""Calls that nobody awaits any more: how one that waits in a thread learns that its coroutine was cancelled."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from consumer.batch import Stopped

_abandoned: ContextVar[threading.Event | None] = ContextVar("abandoned", default=None)


@contextmanager
def abandoned_by(event: threading.Event) -> Iterator[None]:
    """What runs in here ends with Stopped at its next `check_not_abandoned` once the event is set."""
    token = _abandoned.set(event)
    try:
        yield
    finally:
        _abandoned.reset(token)


def check_not_abandoned() -> None:
    """Raise Stopped where whoever asked has gone."""
    event = _abandoned.get()
    if event is not None and event.is_set():
        raise Stopped
