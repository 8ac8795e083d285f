"""The large form of the truth test: random cases up to groups of 20 MB and batches of 600 MB.

usage: python -m proofs.truth --seconds 300 --seed 7
"""

from __future__ import annotations

import argparse
import random
import secrets
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from buffer.redis.server.embedded import EmbeddedServer
from proofs.truth.case import Case, largest_cases, random_case
from proofs.truth.trainer import train, train_in_turns
from proofs.truth.world import World
from tests.consumer.grpo.models.tiny import build_model

MOST_BYTES = 600_000_000
"""Of a batch."""


def try_case(
    number: int, case: Case, runs: int, url: str, base: Path, model_dir: Path
) -> tuple[int, bool]:
    """Run one case on the server, and compare; what ends it is a fault as well.

    Prints a line; returns the number of groups, and whether all were as they were made.
    """
    began = time.monotonic()
    folder = base / f"case-{number}"
    worlds: list[World] = []
    ended = ""
    try:
        with ExitStack() as stack:
            for n in range(runs):
                worlds.append(World(case, url, f"truth-{number}-{n}", folder / str(n)))
                stack.enter_context(worlds[-1].at_work())
            if runs > 1:
                train_in_turns(worlds, model_dir)
            else:
                train(worlds[0], model_dir)
    except Exception as error:
        ended = f", ended by {type(error).__name__}: {str(error)[:80]}"
    verdicts = [world.judge() for world in worlds]
    for verdict in verdicts:
        if verdict.faults:
            say(str(verdict))
    shutil.rmtree(folder)
    groups = sum(verdict.groups for verdict in verdicts)
    wrong = sum(verdict.wrong_groups for verdict in verdicts)
    micro = sum(verdict.wrong_micro_batches for verdict in verdicts)
    seconds = time.monotonic() - began
    say(
        f"{number}: {wrong} of {groups} groups and {micro} micro-batches wrong, {seconds:.0f} s, "
        f"{runs} runs of {case}{ended}"
    )
    return groups, not ended and not wrong and groups > 0


def cases(dice: random.Random, most_bytes: int) -> Iterator[tuple[Case, int]]:
    """Cases and how many runs of each are trained in turns: the largest sizes first."""
    for case in largest_cases(most_bytes):
        yield case, 1
    while True:
        case = random_case(dice, most_bytes)
        two = dice.random() < 0.25 and case.ranks == 1 and case.batch_bytes < most_bytes // 4
        yield case, 2 if two else 1


def run(seconds: float, seed: int, most_bytes: int, folder: Path) -> bool:
    """Run cases until the time is up, one at least; each with an empty server."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    model_dir = build_model(folder, layers=1)
    end = time.monotonic() + seconds
    longest = 0.0
    found: list[tuple[int, bool]] = []
    say(f"seed {seed}")
    for number, (case, runs) in enumerate(cases(random.Random(seed), most_bytes), 1):
        began = time.monotonic()
        if found and began + longest > end:
            break
        with EmbeddedServer(folder / f"server-{number}") as server:
            found.append(try_case(number, case, runs, server.url, folder, model_dir))
        shutil.rmtree(folder / f"server-{number}")
        longest = max(longest, time.monotonic() - began)
    wrong = sum(not is_clean for _, is_clean in found)
    groups = sum(count for count, _ in found)
    verdict = f"{wrong} cases are WRONG" if wrong else "all as they were made"
    say(f"{len(found)} cases, {groups} groups: {verdict}")
    return not wrong


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m proofs.truth", description="Is what is trained what was sampled?"
    )
    parser.add_argument(
        "--seed", type=int, default=secrets.randbelow(1_000_000), help="decides the cases"
    )
    parser.add_argument(
        "--seconds", type=float, default=300.0, help="no case begins that may take longer"
    )
    parser.add_argument("--most-bytes", type=float, default=MOST_BYTES, help="of a batch")
    parser.add_argument("--folder", type=Path, default=Path("build/truth"))
    asked = parser.parse_args()
    return int(not run(asked.seconds, asked.seed, int(asked.most_bytes), asked.folder.resolve()))


if __name__ == "__main__":
    sys.exit(main())
