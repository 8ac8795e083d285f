"""Calls that nobody awaits any more: how one that waits in a thread learns that its coroutine was
cancelled.

What one train step consumes, and what interrupts the wait for it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from buffer.control.task_status import ProduceBatchStatus
from buffer.model.group import RolloutGroup
from buffer.model.manifest import Manifest


class Stopped(Exception):
    """`stop` was called, the run is finished, or whoever awaited was cancelled. Not an error:
    nothing was taken.
    """


@dataclass(frozen=True, slots=True)
class Batch:
    """What one train step consumes. `waited_s`: how long the trainer stood still for it.

    `status` EXPIRED_BATCH: the newest weights can serve no later step, so train this one, then
    publish.
    """

    step: int
    groups: list[RolloutGroup]
    manifest: Manifest
    waited_s: float
    status: ProduceBatchStatus = ProduceBatchStatus.NORMAL


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
