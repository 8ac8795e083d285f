"""Explore the histories, or look for each mutation of the scripts.

python -m tests.model_check --minutes 10
python -m tests.model_check --stories
python -m tests.model_check --mutations
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer

from tests.model_check.explore import Violation, explore
from tests.model_check.histories import HISTORIES, History
from tests.model_check.mutants import look_for_mutations, stories_that_do_not_fail
from tests.model_check.world import World


def main(
    minutes: Annotated[float, typer.Option(help="for all histories together")] = 10.0,
    only: Annotated[str, typer.Option(help="histories whose name has this word")] = "",
    mutations: Annotated[
        bool, typer.Option(help="look for the mutations without a result instead")
    ] = False,
    stories: Annotated[
        bool, typer.Option(help="require that each mutation breaks its story instead")
    ] = False,
) -> None:
    """Explore histories and print how much of each was seen."""
    if mutations:
        sys.exit(look_for_mutations(only))
    if stories:
        with tempfile.TemporaryDirectory() as folder:
            missed = stories_that_do_not_fail(only, Path(folder))
        for mutation in missed:
            typer.echo(f"NOT NOTICED {mutation.story}: {mutation}")
        sys.exit(bool(missed))
    chosen = [history for history in HISTORIES if only in history.name]
    end = time.monotonic() + 60 * minutes
    for number, history in enumerate(chosen):
        share_s = max(1.0, (end - time.monotonic()) / (len(chosen) - number))
        if not _explore(history, share_s):
            sys.exit(1)


def _explore(history: History, seconds: float) -> bool:
    world = World(history.limits, history.prepare)
    try:
        seen = explore(world, history.processes, history.budget, seconds=seconds, finish_each=50)
    except Violation as violation:
        typer.echo(f"{history.name}: {violation}")
        return False
    finally:
        world.close()
    whole = "all of it" if seen.is_whole else f"to depth {seen.depth}"
    typer.echo(
        f"{history.name}: {seen.states:,} states, {seen.moves:,} moves, {seen.calls:,} calls, "
        f"{seen.finished:,} runs finished; {whole}"
    )
    return True


if __name__ == "__main__":
    typer.run(main)
