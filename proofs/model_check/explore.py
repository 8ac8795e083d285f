"""Visit every state that a history can lead to, nearest first."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from proofs.model_check.finish import finish
from proofs.model_check.processes import Process
from proofs.model_check.server_image import frozen
from proofs.model_check.world import Budget, State, World


class Violation(AssertionError):
    """A history that breaks an invariant."""


@dataclass
class Explored:
    """How much was seen. `is_whole`: no state is left."""

    states: int = 0
    moves: int = 0
    calls: int = 0
    depth: int = 0
    is_whole: bool = False
    finished: int = 0
    """states from which the run was finished"""


Path = tuple["Path", str] | None
T = TypeVar("T")


def explore(
    world: World,
    processes: tuple[Process, ...],
    budget: Budget,
    *,
    most_states: int = 1_000_000_000,
    seconds: float = 1e9,
    finish_each: int = 0,
) -> Explored:
    """Raise Violation, with the shortest history, for the first invariant that does not hold.

    From one of `finish_each` states, the run is finished (0: from none).
    """
    with frozen(world.clock):
        first = checked(None, partial(world.start, processes, budget))
        return _explore_from(world, first, most_states, seconds, finish_each)


def _explore_from(
    world: World, first: State, most_states: int, seconds: float, finish_each: int
) -> Explored:
    end = time.monotonic() + seconds
    first_key = world.key_of(first)
    seen = {first_key}
    queue: deque[tuple[State, Path, int]] = deque([(first, None, 0)])
    explored = Explored(states=1)
    while queue and explored.states < most_states and time.monotonic() < end:
        state, path, explored.depth = queue.popleft()
        for move in world.moves(state):
            explored.moves += 1
            here = (path, move.label)
            after = checked(here, move.happen)
            key = first_key if after is None else world.key_of(after)
            if after is None or key in seen:
                continue
            seen.add(key)
            explored.states += 1
            if finish_each and explored.states % finish_each == 0:
                explored.finished += 1
                checked(here, partial(finish, world, after))
            queue.append((after, here, explored.depth + 1))
    explored.is_whole = not queue
    explored.calls = world.calls
    return explored


def checked(path: Path, happen: Callable[[], T]) -> T:
    """Return what `happen` does; raise Violation, with the history, for any error of it."""
    try:
        return happen()
    except Exception as error:  # every error of a history is a finding
        raise Violation(f"{type(error).__name__}: {error}\nafter\n{_history(path)}") from error


def _history(path: Path) -> str:
    labels = []
    while path is not None:
        path, label = path
        labels.append(label)
    return "\n".join(f"  {n}. {label}" for n, label in enumerate(reversed(labels), 1))
