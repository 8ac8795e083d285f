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

_BATCHES = 4  # only the newest: a trainer may keep groups for good, for example to show them


class DeliveredGroups:
    """Groups of the newest batches, as long as the trainer holds them."""

    def __init__(self) -> None:
        self._batches: deque[list[ref[RolloutGroup]]] = deque(maxlen=_BATCHES)

    def add(self, groups: Sequence[RolloutGroup]) -> None:
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
    """`stop` was called, the run is finished, or the caller cancelled; nothing was taken."""


@dataclass(frozen=True, slots=True)
class Batch:
    """What one train step consumes.

    `status` EXPIRED_BATCH: the newest weights are too old for the next step; train, then publish.
    """

    step: int
    groups: list[RolloutGroup]
    manifest: Manifest
    waited_s: float  # the trainer waited for this batch
    status: ProduceBatchStatus = ProduceBatchStatus.NORMAL

    @property
    def table(self) -> BatchTable:
        """Return the columns of all groups, joined at each access."""
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
