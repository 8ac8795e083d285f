"""Look for each mutation of the scripts with the model checker.

`RESULTS` has one line per mutation: its name, the history that finds it (empty: none does), the
states and the depth at which that history finds it, and what breaks.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import typer

from buffer.store.scripts import Script, library
from tests.buffer.invariants.batch_mutations import BATCHES
from tests.buffer.invariants.byte_count_mutations import BYTE_COUNT
from tests.buffer.invariants.mutation import Mutation
from tests.buffer.invariants.one_place_mutations import ONE_PLACE
from tests.buffer.invariants.running_mutations import RUNNING
from tests.model_check.explore import Violation, explore
from tests.model_check.histories import HISTORIES, History
from tests.model_check.world import World

MUTATIONS = [*ONE_PLACE, *BATCHES, *RUNNING, *BYTE_COUNT]
RESULTS = Path(__file__).with_name("mutations.tsv")
ROUNDS = (50, 200)
"""States of each history: a mutation that shows early in any history is found first."""

FINISH_EACH = 100


class Result(NamedTuple):
    """How a mutation was found. `history`: empty if no history finds it."""

    name: str
    history: str = ""
    states: int = 0
    depth: int = 0
    broken: str = ""


def name_of(mutation: Mutation) -> str:
    """Return a name that no other mutation has."""
    changed = [mutation.old, mutation.new] if mutation.new else [mutation.old]
    limits = [str(dict(mutation.limits))] if mutation.limits else []
    texts = [" ".join(text.split()) for text in changed]
    return " | ".join([mutation.invariant, mutation.file, *texts, *limits])


class _Recorded(dict[str, Script]):
    """Scripts that note which of them are called."""

    def __init__(self, scripts: Mapping[str, Script]) -> None:
        super().__init__(scripts)
        self.called: set[str] = set()

    def __getitem__(self, name: str) -> Script:
        self.called.add(name)
        return super().__getitem__(name)


def find(mutation: Mutation) -> Result:
    """Return how the histories find a mutation."""
    name = name_of(mutation)
    scripts = mutation.scripts()
    changed = {one for one, script in scripts.items() if script.source != library()[one].source}
    histories = [history for history in HISTORIES if changed & _called_in(history)]
    for most_states in ROUNDS:
        for history in histories:
            try:
                _explore(history, scripts, mutation.limits, most_states)
            except Violation as violation:
                broken = str(violation).partition("\n")[0][:100]
                return Result(name, history.name, violation.states, violation.depth, broken)
    return Result(name, broken="" if histories else "no history calls it")


@cache
def _called_in(history: History) -> set[str]:
    """Return the scripts that the operations of a history call within its first states."""
    scripts = _Recorded(library())
    _explore(history, scripts, {}, ROUNDS[-1])
    return scripts.called


def _explore(
    history: History, scripts: Mapping[str, Script], limits: Mapping[str, Any], most_states: int
) -> None:
    world = World({**history.limits, **limits}, history.prepare, scripts)
    try:
        # finishing calls almost every script: only where what is called does not matter
        finish_each = 0 if isinstance(scripts, _Recorded) else FINISH_EACH
        explore(
            world,
            history.processes,
            history.budget,
            most_states=most_states,
            finish_each=finish_each,
        )
    finally:
        world.close()


def look_for_mutations(only: str, results: Path) -> int:
    """Look for each mutation that `results` does not have; return how many are not found."""
    known = {result.name: result for result in read_results(results)}
    for mutation in MUTATIONS:
        name = name_of(mutation)
        if only not in name or name in known:
            continue
        known[name] = find(mutation)
        typer.echo(known[name])
        with results.open("a", encoding="utf-8", newline="") as file:
            csv.writer(file, "excel-tab", lineterminator="\n").writerow(known[name])
    return sum(not result.history for result in known.values())


def read_results(results: Path) -> Iterator[Result]:
    if results.exists():
        with results.open(encoding="utf-8", newline="") as file:
            for name, history, states, depth, broken in csv.reader(file, "excel-tab"):
                yield Result(name, history, int(states), int(depth), broken)
