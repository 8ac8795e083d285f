"""Small histories, seen whole; `make model-check` explores larger ones for minutes."""

from __future__ import annotations

import pytest

from proofs.model_check.explore import Explored, Violation, explore
from proofs.model_check.histories import HISTORIES, History
from proofs.model_check.mutation import read_mutations
from proofs.model_check.processes import Janitor, Producer, Trainer, Worker
from proofs.model_check.world import Budget, World

ONE_STEP = Trainer(1, is_opened_first=True)
SMALL = (
    History("producers", (Producer(1),), Budget(deaths=1, lost_replies=1, late_calls=1)),
    History("trainers", (ONE_STEP,), Budget(deaths=1, late_calls=1), ready=1),
    History(
        "a worker falls silent",
        (Worker("w0", beats=False), Janitor()),
        Budget(ticks=1, jumps=1),
        waiting=1,
    ),
)


def run(history: History, **options: int) -> Explored:
    world = World(history.limits, history.prepare)
    try:
        return explore(world, history.processes, history.budget, **options)
    finally:
        world.close()


@pytest.mark.parametrize("history", SMALL, ids=lambda history: history.name)
def test_no_interleaving_of_a_small_history_breaks_an_invariant(history: History) -> None:
    seen = run(history, finish_each=100)
    assert seen.is_whole
    assert seen.states > 40


@pytest.mark.parametrize("history", HISTORIES, ids=lambda history: history.name)
def test_the_first_states_of_each_history(history: History) -> None:
    seen = run(history, most_states=40, finish_each=40)
    assert 40 <= seen.states < 80
    assert seen.finished


@pytest.mark.parametrize(
    ("file", "line", "history"),
    [("enqueue", "~= nonce then return {'FENCED'}", SMALL[0]), ("commit", "SETBIT", SMALL[1])],
)
def test_a_script_without_a_line_is_found(file: str, line: str, history: History) -> None:
    """The search itself can fail: a missing line leads to a history that breaks an invariant."""
    (mutation, *_) = [one for one in read_mutations() if one.file == file and line in one.old]
    world = World(history.limits, history.prepare, mutation.scripts())
    try:
        with pytest.raises(Violation, match=r"after\n  1\. "):
            explore(world, history.processes, history.budget, finish_each=20)
    finally:
        world.close()
