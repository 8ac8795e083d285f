"""What every measured queue is asked to do, and what must come out of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from buffer.wire.group import RolloutGroup

ARRAYS = ("input_ids", "logprobs", "mask")


class Row(NamedTuple):
    """One rollout as numbers: all of it that is compared."""

    input_ids: NDArray[Any]
    logprobs: NDArray[Any]
    mask: NDArray[Any]
    score: float

    def equals(self, other: Row) -> bool:
        return self.score == other.score and all(
            np.array_equal(getattr(self, name), getattr(other, name)) for name in ARRAYS
        )


class Columns(Protocol):
    """A group as columns over all of its rollouts."""

    prompt_ids: NDArray[np.int32]
    lengths: NDArray[np.int32]
    response_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    mask: NDArray[np.uint8]
    scores: NDArray[np.float32]


COLUMNS = tuple(Columns.__annotations__)


def rows(group: Any) -> Iterator[Row]:
    """Yield the rollouts of a group, or of anything with its `Columns`."""
    ends = np.cumsum(group.lengths)[:-1]
    parts = (np.split(part, ends) for part in (group.response_ids, group.logprobs, group.mask))
    for ids, logprobs, mask, score in zip(*parts, group.scores, strict=True):
        yield Row(np.concatenate([group.prompt_ids, ids]), logprobs, mask, float(score))


class Peer(Protocol):
    """A queue that runs. Of its methods, `put` and `take` are timed."""

    @property
    def slow(self) -> bool: ...

    @property
    def name(self) -> str: ...

    @property
    def durable(self) -> bool: ...

    @property
    def servers(self) -> Sequence[int]:
        """Return the ids of the processes that serve this one."""

    def prepare(self, groups: list[RolloutGroup], /) -> Any:
        """Return these groups in the form that the queue takes: one chunk."""

    def put(self, chunk: Any, /) -> None:
        """Put a chunk in as few calls as the queue has for it."""

    def take(self, chunk: Any, /) -> Any:
        """Take the chunk that was put last."""

    def rows(self, taken: Any, /) -> Iterator[Row]:
        """Yield the rollouts of what was taken."""

    def forget(self, chunk: Any, /) -> None:
        """Acknowledge the chunk, so that the queue keeps it no longer."""
