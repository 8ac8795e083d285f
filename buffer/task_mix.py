"""How each batch is shared among the training tasks.

A task of weight w gets w / (sum of weights) of all batches so far, rounded up or down, after every
step: what one batch owes a task, a later one gives it. The shares of a step follow from the step
and the history of the weights alone, so a producer, a trainer and one that was resumed agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache

from pydantic import BaseModel, ConfigDict, Field

GROUP = 1 << 60
"""Parts of a group. Shares are counted in them: integers are exact, and equal on all machines."""

MOST_PARTS = 64
"""Changes of weights that are kept: more than the steps that a kept checkpoint can repeat."""

STRIDE = 64  # batches from one remembered state to the next

State = tuple[tuple[int, ...], tuple[int, ...]]
"""What each task was given, in groups, and what it is owed, in parts of a `GROUP`."""


class Reweighting(BaseModel):
    """Task weights from a train step on.

    Of each task in all earlier batches: `before`, its groups; `owed`, the parts of a `GROUP` that
    they lack of its exact share.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    from_step: int = Field(ge=1)
    weights: dict[str, float]
    before: dict[str, int] = {}
    owed: dict[str, int] = {}


class TaskMix:
    """How each batch is shared among the training tasks: producer and trainer compute the same.

    Before the first change in `history`, only sums are known.
    """

    def __init__(self, batch_size: int, history: Sequence[Reweighting]) -> None:
        self._batch_size = batch_size
        self._parts = [history[0]]
        for part in history[1:]:
            before, owed = self._until(part.from_step - 1)
            self._parts.append(part.model_copy(update={"before": before, "owed": owed}))

    def part(self, step: int) -> Reweighting:
        """Return the weights that hold for a train step, with the sums before them."""
        return next((p for p in reversed(self._parts) if p.from_step <= step), self._parts[0])

    def shares(self, step: int) -> dict[str, int]:
        """Return the groups of each task in the batch of train step `step`."""
        step = max(step, self._parts[0].from_step)
        before = self._until(step - 1)[0]
        return {task: n - before.get(task, 0) for task, n in self._until(step)[0].items()}

    def groups_until(self, task: str, step: int) -> int:
        """Return the groups of a task in the batches of steps 1 to `step` together."""
        return self._until(step)[0].get(task, 0)

    def _until(self, step: int) -> tuple[dict[str, int], dict[str, int]]:
        part = self.part(step)
        tasks, size = part.weights, self._batch_size
        total = sum(map(Fraction, tasks.values()))
        if size < 0 or total <= 0 or min(tasks.values()) < 0:
            raise ValueError(f"cannot share {size} groups by weights {tasks}")
        # of each task in a batch, in parts of a `GROUP`
        exact = [int(size * GROUP * Fraction(weight) / total) for weight in tasks.values()]
        exact[exact.index(max(exact))] += size * GROUP - sum(exact)
        given, owed = _after(
            tuple(exact),
            tuple(part.owed.get(task, 0) for task in tasks),
            max(0, step - part.from_step + 1),
        )
        groups = {task: part.before.get(task, 0) + n for task, n in zip(tasks, given, strict=True)}
        return part.before | groups, part.owed | dict(zip(tasks, owed, strict=True))


def newest_parts(
    history: Sequence[Reweighting], mix: TaskMix, most: int = MOST_PARTS
) -> list[Reweighting]:
    """Return the last `most` changes of `mix`, the first of them with the sums before it."""
    # a loop of the user may change weights at every step, and all processes read the list
    first, *others = history[-most:]
    return [mix.part(first.from_step) if len(history) > most else first, *others]


@lru_cache(maxsize=4096)
def _after(exact: tuple[int, ...], owed: tuple[int, ...], batches: int) -> State:
    """Return the state after a number of batches, of which the first call counts every one."""
    known = _remembered(exact, owed)
    at = batches - batches % STRIDE
    while at not in known:
        at -= STRIDE
    state = known[at]
    for number in range(at + 1, batches + 1):
        given, owed = state
        groups, owed = _next_batch(exact, owed)
        state = tuple(map(sum, zip(given, groups, strict=True))), owed
        if number % STRIDE == 0:
            known[number] = state
    return state


@lru_cache(maxsize=256)
def _remembered(exact: tuple[int, ...], owed: tuple[int, ...]) -> dict[int, State]:
    return {0: ((0,) * len(exact), owed)}


def _next_batch(exact: tuple[int, ...], owed: tuple[int, ...]) -> State:
    """Return the groups of the next batch, and what is owed after it.

    Each task first gets the whole groups that it is owed. What is left goes to the tasks that are
    owed a part of one, the earliest due first: the batch in which the rest of that group is owed,
    too. No schedule is late if that one is (earliest deadline first, with one unit for each group).
    """
    size = sum(exact) // GROUP
    due = [was + share for was, share in zip(owed, exact, strict=True)]
    groups = [
        max(0, parts // GROUP) if share else 0 for parts, share in zip(due, exact, strict=True)
    ]
    rest = [parts - GROUP * n for parts, n in zip(due, groups, strict=True)]

    def urgency(task: int) -> tuple[bool, int, int]:
        return rest[task] <= 0, -((rest[task] - GROUP) // exact[task]), -rest[task]

    while (left := size - sum(groups)) != 0:
        # fewer only where changed weights left a task more than one group ahead
        sign = 1 if left > 0 else -1
        if sign > 0:
            task = min((n for n, share in enumerate(exact) if share), key=urgency)
        else:
            task = min((n for n, given in enumerate(groups) if given), key=rest.__getitem__)
        groups[task] += sign
        rest[task] -= sign * GROUP
    return tuple(groups), tuple(rest)
