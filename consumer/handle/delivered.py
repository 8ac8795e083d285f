"""Remembers the groups that a trainer has got, to compare them with what the server sent."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from weakref import ref

from buffer.rollouts.group import RolloutGroup

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
