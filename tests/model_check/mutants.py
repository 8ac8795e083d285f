"""Look for each mutation of the scripts: with its story, and with the model checker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import typer

from buffer.errors import RolloutMQError
from buffer.redis.scripts import library
from buffer.redis.store import Store
from tests.buffer.invariants.test_stories import tell
from tests.model_check.explore import Violation, checked, explore, explore_from
from tests.model_check.finish import finish
from tests.model_check.histories import HISTORIES, History
from tests.model_check.mutation import Mutation, read_mutations, write_mutations
from tests.model_check.operations import Finished
from tests.model_check.server_image import Image, frozen
from tests.model_check.world import SETTINGS, Made, State, World
from tests.servers import start_server

STATES = 400
"""of each history, with the scripts as they are"""
BRANCHES, STATES_OF_A_BRANCH = 3, 40
"""explored of each history, from calls that a mutated script carries out in another way"""


def stories_that_do_not_fail(only: str, folder: Path) -> list[Mutation]:
    """Tell the story of each mutation to its scripts, on a server; return those without an effect."""
    missed = []
    with start_server("valkey", folder) as server, server.connect() as raw:
        for mutation in read_mutations():
            if not mutation.story or only not in str(mutation):
                continue
            store = Store(server.url, deadline_s=2.0)
            store.scripts = mutation.scripts()
            raw.script_load(store.scripts.get(mutation.file, store.scripts["claim"]).source)
            try:
                tell(mutation.story, mutation.limits, store, raw)
                missed.append(mutation)
            except (AssertionError, RolloutMQError, pytest.fail.Exception) as error:
                # a script that only crashes has not been noticed by the story
                if "user_script" in str(error):
                    missed.append(mutation)
            finally:
                store.close()
    return missed


def find(mutation: Mutation) -> tuple[str, str]:
    """Return which history finds a mutation ("": none), and what breaks.

    Each call of a changed script, in the states that the scripts as they are lead to, is carried
    out by the mutated one; where it does something else, what follows is explored, too.
    """
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
            return history.name, str(violation).partition("\n")[0][:100]
    return "", _NOT_FOUND[bool(histories) + differs]


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


def look_for_mutations(only: str) -> int:
    """Look for each mutation that the file has no result of; return how many are not found."""
    mutations = read_mutations()
    missed = 0
    for mutation in mutations:
        if only not in str(mutation) or mutation.history or mutation.explained:
            continue
        mutation.history, mutation.broken = find(mutation)
        missed += not mutation.history
        typer.echo(f"{mutation}: {mutation.history or 'NOT FOUND'}: {mutation.broken}")
        write_mutations(mutations)
    return missed
