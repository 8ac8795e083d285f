"""Look for each mutation of the scripts with the model checker.

`RESULTS` has one line per mutation: its name, the history that finds it (empty: none does), and what
breaks.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import typer

from buffer.redis.scripts import library
from tests.buffer.invariants.batch_mutations import BATCHES
from tests.buffer.invariants.byte_count_mutations import BYTE_COUNT
from tests.buffer.invariants.mutation import Mutation
from tests.buffer.invariants.one_place_mutations import ONE_PLACE
from tests.buffer.invariants.running_mutations import RUNNING
from tests.chaos import mutations as chaos_mutations
from tests.model_check.explore import Violation, checked, explore, explore_from
from tests.model_check.finish import finish
from tests.model_check.histories import HISTORIES, History
from tests.model_check.operations import Finished
from tests.model_check.server_image import Image, frozen
from tests.model_check.world import SETTINGS, Made, State, World

_OF_CHAOS = [
    Mutation("chaos", file, old, lambda _: None, new=new)
    for file, old, new in chaos_mutations.MUTATIONS.values()
]
_ALL = [*_OF_CHAOS, *ONE_PLACE, *BATCHES, *RUNNING, *BYTE_COUNT]
MUTATIONS = list({(one.file, one.old, one.new, str(one.limits)): one for one in _ALL}.values())
"""each once, although several tests use some"""
RESULTS = Path(__file__).with_name("mutations.tsv")
STATES = 400
"""of each history, with the scripts as they are"""
BRANCHES, STATES_OF_A_BRANCH = 3, 40
"""explored of each history, from calls that a mutated script carries out in another way"""


class Result(NamedTuple):
    """How a mutation was found. `history`: empty if no history finds it."""

    name: str
    history: str = ""
    broken: str = ""


def name_of(mutation: Mutation) -> str:
    """Return a name that no other mutation has."""
    changed = [mutation.old, mutation.new] if mutation.new else [mutation.old]
    limits = [str(dict(mutation.limits))] if mutation.limits else []
    texts = [" ".join(text.split()) for text in changed]
    return " | ".join([mutation.invariant, mutation.file, *texts, *limits])


def find(mutation: Mutation) -> Result:
    """Return which history finds a mutation.

    Each call of a changed script, in the states that the scripts as they are lead to, is carried
    out by the mutated one; where it does something else, what follows is explored, too.
    """
    name = name_of(mutation)
    scripts = mutation.scripts()
    changed = {one for one, script in scripts.items() if script.source != library()[one].source}
    histories = [one for one in HISTORIES if changed & {call.what for call in _seen(one, {})[1]}]
    differs = False
    for history in histories:
        world, made = _seen(history, _unlike(history, mutation))
        world.use_scripts(scripts)
        try:
            differs |= _follow(world, [call for call in made if call.what in changed])
        except Violation as violation:
            return Result(name, history.name, str(violation).partition("\n")[0][:100])
    return Result(name, "", _NOT_FOUND[bool(histories) + differs])


_NOT_FOUND = ("no history calls it", "no call of a history is changed by it", "it breaks nothing")


def _follow(world: World, made: list[Made]) -> bool:
    """Carry out calls with other scripts; return whether one of them changed something else."""
    branches = []
    with frozen(world.clock):
        for call in made:
            after, came = checked(None, partial(world.call_server, call.state, call.pending))
            is_other = isinstance(came, Finished) or came.reply != call.reply
            if is_other or after.numbers != call.after.numbers:
                branches.append((call, after))
        for call, after in branches[:BRANCHES]:
            _explore_branch(world, call, after)
    return bool(branches)


def _explore_branch(world: World, call: Made, after: Image) -> None:
    """Raise Violation for mutated scripts, unless those of the product end alike."""
    mutated = world.store.scripts
    try:
        _see_what_follows(world, call.state, after)
    except Violation as found:
        world.use_scripts(library())
        try:
            _see_what_follows(world, call.state, call.after)
        except Violation:
            return
        raise found
    finally:
        world.use_scripts(mutated)


def _see_what_follows(world: World, state: State, after: Image) -> None:
    """Explore from a state, and finish the run from the server that its next call leaves."""
    explore_from(world, state, STATES_OF_A_BRANCH, 1e9, STATES_OF_A_BRANCH // 2)
    checked(None, partial(finish, world, replace(state, image=after)))


_worlds: dict[tuple[str, str], tuple[World, list[Made]]] = {}


def _seen(history: History, limits: Mapping[str, Any]) -> tuple[World, list[Made]]:
    """Return a world in which a history was explored with the scripts as they are, and its calls."""
    name = (history.name, str(limits))
    if name not in _worlds:
        world = World({**history.limits, **limits}, history.prepare)
        explore(world, history.processes, history.budget, most_states=STATES, finish_each=100)
        _worlds[name] = (world, list(world.made))
    return _worlds[name]


def _unlike(history: History, mutation: Mutation) -> dict[str, Any]:
    """Return the limits that a mutation needs, if the history has others."""
    same = SETTINGS | dict(history.limits)
    return {name: value for name, value in mutation.limits.items() if same.get(name) != value}


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
            for row in csv.reader(file, "excel-tab"):
                yield Result(*row)
