"""What one train step consumes, and how the wait for it is interrupted."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from buffer.control.task_status import ProduceBatchStatus
from buffer.model.manifest import Manifest
from buffer.rollouts.batch_table import BatchTable
from buffer.rollouts.group import RolloutGroup


class Stopped(Exception):
    """`stop` was called, the run is finished, or the awaiting coroutine was cancelled.

    Not an error: nothing was taken.
    """


@dataclass(frozen=True, slots=True)
class Batch:
    """Contains what one train step consumes.

    `status` EXPIRED_BATCH: the newest weights can serve no later step, so train this batch, then
    publish.
    """

    step: int
    groups: list[RolloutGroup]
    manifest: Manifest
    waited_s: float
    """seconds for which the trainer was blocked while it waited for this batch"""
    status: ProduceBatchStatus = ProduceBatchStatus.NORMAL

    @property
    def table(self) -> BatchTable:
        """Return the columns of all groups one after another, made at each access."""
        return BatchTable.of(self.groups)


_abandoned: ContextVar[threading.Event | None] = ContextVar("abandoned", default=None)


@contextmanager
def abandoned_by(event: threading.Event) -> Iterator[None]:
    """Interrupt the waits within this block once the event is set."""
    token = _abandoned.set(event)
    try:
        yield
    finally:
        _abandoned.reset(token)


def check_not_abandoned() -> None:
    """Raise Stopped if the caller no longer awaits the result."""
    event = _abandoned.get()
    if event is not None and event.is_set():
        raise Stopped
