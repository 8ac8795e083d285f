"""Look for each mutation of the scripts with the model checker."""

from __future__ import annotations

import time

import typer

from tests.buffer.invariants.batch_mutations import BATCHES
from tests.buffer.invariants.byte_count_mutations import BYTE_COUNT
from tests.buffer.invariants.mutation import Mutation
from tests.buffer.invariants.one_place_mutations import ONE_PLACE
from tests.buffer.invariants.running_mutations import RUNNING
from tests.model_check.explore import Violation, explore
from tests.model_check.histories import HISTORIES
from tests.model_check.world import World

MUTATIONS = [*ONE_PLACE, *BATCHES, *RUNNING, *BYTE_COUNT]
SECONDS = 8.0


def find(mutation: Mutation, seconds: float = SECONDS) -> str:
    """Return the name of the first history that finds a mutation; "" if none does."""
    scripts = mutation.scripts()
    for history in HISTORIES:
        try:
            world = World({**history.limits, **mutation.limits}, history.prepare, scripts)
        except Exception:  # the mutation already stops what comes before the history
            return f"{history.name} (before it begins)"
        try:
            explore(world, history.processes, history.budget, seconds=seconds, finish_each=60)
        except Violation:
            return history.name
        finally:
            world.close()
    return ""


def look_for_mutations(only: str) -> int:
    """Print which history finds each mutation; return how many are not found."""
    missed = 0
    for mutation in MUTATIONS:
        if only and only not in str(mutation):
            continue
        began = time.monotonic()
        found = find(mutation)
        missed += not found
        label = f"{mutation} {mutation.old.strip()[:60]!r}"
        typer.echo(f"{label}: {found or 'NOT FOUND'} ({time.monotonic() - began:.0f} s)")
    return missed
