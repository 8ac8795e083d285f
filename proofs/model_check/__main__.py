"""Explore the histories, or tell the stories to scripts without their lines.

python -m proofs.model_check --minutes 10
python -m proofs.model_check --stories
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import pytest
import typer

from buffer.errors import RolloutMQError
from buffer.redis.store import Store
from proofs.model_check.explore import Violation, explore
from proofs.model_check.histories import HISTORIES, History
from proofs.model_check.mutation import Mutation, read_mutations
from proofs.model_check.world import World
from tests.buffer.invariants.test_stories import tell
from tests.servers import start_server


def main(
    minutes: Annotated[float, typer.Option(help="for all histories together")] = 10.0,
    only: Annotated[str, typer.Option(help="histories whose name has this word")] = "",
    stories: Annotated[
        bool, typer.Option(help="require that each mutation breaks its story instead")
    ] = False,
) -> None:
    """Explore histories and print how much of each was seen."""
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
