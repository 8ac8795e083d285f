"""What one train step consumes, and how the wait for it is interrupted."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from weakref import ref

from buffer.control.task_status import ProduceBatchStatus
from buffer.model.manifest import Manifest
from buffer.wire.group import RolloutGroup
from consumer.handle.batch_table import BatchTable

_BATCHES = 4
"""The newest ones: a trainer may keep groups for good, to show them for example."""


class DeliveredGroups:
    """The groups of the newest batches that the trainer still holds.

    A group that it has dropped is done with, and is not compared any more.
    """

    def __init__(self) -> None:
        self._batches: deque[list[ref[RolloutGroup]]] = deque(maxlen=_BATCHES)

    def add(self, groups: Sequence[RolloutGroup]) -> None:
        """Remember the groups of a batch."""
        self._batches.append([ref(group) for group in groups])

    def clear(self) -> None:
        """Forget all groups: something else has compared them."""
        self._batches.clear()

    def check(self) -> None:
        """Raise GroupChanged unless all groups are what the server sent. Any thread may call it."""
        for held in [held for batch in list(self._batches) for held in batch]:
            if group := held():
                group.check_unchanged()


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
