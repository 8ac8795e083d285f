"""How the batch of each train step is shared among the training tasks.

Producer and trainer compute the same shares from the run's limits. New weights hold from the first
step for which nothing was started yet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pydantic import BaseModel, ConfigDict, Field

MOST_PARTS = 64
"""Changes of weights that are kept: more than the steps that a kept checkpoint can repeat."""


class Reweighting(BaseModel):
    """Task weights from a train step on; `before`: groups of each task in all earlier batches."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    from_step: int = Field(ge=1)
    weights: dict[str, float]
    before: dict[str, int] = {}


class TaskMix:
    """The shares of batches; before the first change in `history`, only sums are known."""

    def __init__(self, batch_size: int, history: Sequence[Reweighting]) -> None:
        self._history = history
        self._shares = [allocate(batch_size, part.weights) for part in history]

    def shares(self, step: int) -> dict[str, int]:
        """Return the groups of each task in the batch of train step `step`."""
        newest = max(
            (n for n, part in enumerate(self._history) if part.from_step <= step), default=0
        )
        return self._shares[newest]

    def groups_until(self, task: str, step: int) -> int:
        """Return the groups of a task in the batches of steps 1 to `step` together."""
        total = self._history[0].before.get(task, 0)
        ends = [part.from_step - 1 for part in self._history[1:]] + [step]
        for part, shares, end in zip(self._history, self._shares, ends, strict=True):
            total += shares[task] * max(0, min(end, step) - part.from_step + 1)
        return total


def newest_parts(
    history: Sequence[Reweighting], mix: TaskMix, most: int = MOST_PARTS
) -> list[Reweighting]:
    """Return the last `most` changes of `mix`, the first of them with the sums before it."""
    # a curriculum may change weights at every step, and all processes read the list
    first, *others = history[-most:]
    if len(history) > most:
        before = {task: mix.groups_until(task, first.from_step - 1) for task in first.weights}
        first = first.model_copy(update={"before": before})
    return [first, *others]


def allocate(batch_size: int, weights: Mapping[str, float]) -> dict[str, int]:
    """Share a batch by weight, then largest remainder, then order: 2:1:0 of 7 is 5, 2, 0."""
    total = sum(weights.values())
    if batch_size < 0 or total <= 0 or min(weights.values()) < 0:
        raise ValueError(f"cannot share {batch_size} groups by weights {dict(weights)}")
    exact = {task: batch_size * weight / total for task, weight in weights.items()}
    shares = {task: int(share) for task, share in exact.items()}
    by_remainder = sorted(exact, key=lambda task: shares[task] - exact[task])
    for task in by_remainder[: batch_size - sum(shares.values())]:
        shares[task] += 1
    return shares
