"""How a batch is shared among the training tasks, at each train step.

Producer and trainer compute the same shares from the run's limits, so that neither has to ask the
other. Weights that are changed while a run goes on hold from a later step on, one for which nothing
was started yet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pydantic import BaseModel, ConfigDict, Field

MOST_PARTS = 64
"""Changes that are remembered one by one: more than steps can be taken again from a checkpoint that
is kept.
"""


class Reweighting(BaseModel):
    """Weights by training task that hold from a train step on. `before`: groups of each task in all
    batches before it, where what came earlier is forgotten.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    from_step: int = Field(ge=1)
    weights: dict[str, float]
    before: dict[str, int] = {}


class TaskMix:
    """Shares of a batch of `batch_size` groups; `history` in the order of its steps. What was
    before the first of them is known in sum only.
    """

    def __init__(self, batch_size: int, history: Sequence[Reweighting]) -> None:
        self._history = history
        self._shares = [allocate(batch_size, part.weights) for part in history]

    def shares(self, step: int) -> dict[str, int]:
        """Groups of each task in the batch of train step `step`."""
        place = max(
            (n for n, part in enumerate(self._history) if part.from_step <= step), default=0
        )
        return self._shares[place]

    def groups_until(self, task: str, step: int) -> int:
        """Groups of a task in the batches of steps 1 to `step`, in all."""
        total = self._history[0].before.get(task, 0)
        ends = [part.from_step - 1 for part in self._history[1:]] + [step]
        for part, shares, end in zip(self._history, self._shares, ends, strict=True):
            total += shares[task] * max(0, min(end, step) - part.from_step + 1)
        return total


def newest_parts(
    history: Sequence[Reweighting], mix: TaskMix, most: int = MOST_PARTS
) -> list[Reweighting]:
    """The last `most` parts, the first of which knows the sum of what was before: a curriculum may
    change weights at every step, and all processes read the list. `mix` is that of the whole
    history.
    """
    first, *others = history[-most:]
    if len(history) > most:
        before = {task: mix.groups_until(task, first.from_step - 1) for task in first.weights}
        first = first.model_copy(update={"before": before})
    return [first, *others]


def allocate(batch_size: int, weights: Mapping[str, float]) -> dict[str, int]:
    """Groups of each task in a batch: by weight, largest remainder first, ties by order (2:1:0 of 7
    is 5, 2, 0).
    """
    total = sum(weights.values())
    if batch_size < 0 or total <= 0 or min(weights.values()) < 0:
        raise ValueError(f"cannot share {batch_size} groups by weights {dict(weights)}")
    exact = {task: batch_size * weight / total for task, weight in weights.items()}
    shares = {task: int(share) for task, share in exact.items()}
    by_remainder = sorted(exact, key=lambda task: shares[task] - exact[task])
    for task in by_remainder[: batch_size - sum(shares.values())]:
        shares[task] += 1
    return shares
