"""The large form of the truth test: random cases up to groups of 20 MB and batches of 600 MB.

usage: python -m tests.truth --seconds 300 --seed 7
"""

from __future__ import annotations

import argparse
import random
import secrets
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields
from pathlib import Path

from buffer.redis.server.embedded import EmbeddedServer
from tests.consumer.grpo.models.tiny import build_model
from tests.truth.case import TOKEN_BYTES, Case, largest_cases, random_case
from tests.truth.trainer import train, train_in_turns
from tests.truth.world import World

MOST_BYTES = 600_000_000
"""Of a batch."""


@dataclass(frozen=True)
class Row:
    """What became of the runs of one case, which were trained in one process."""

    number: int
    case: Case
    runs: int
    seconds: float
    groups: int = 0
    micro_batches: int = 0
    wrong_groups: int = 0
    wrong_micro_batches: int = 0
    ended: str = ""
    """the error that ended it"""

    @property
    def is_clean(self) -> bool:
        return not self.ended and not self.wrong_groups and self.groups > 0

    def line(self) -> str:
        """A row of the table."""
        verdict = f"{self.wrong_groups} of {self.groups}"
        micro = f"{self.wrong_micro_batches} of {self.micro_batches}"
        size = f"{self.case.batch} x {self.case.group_bytes[0] / 1e6:.1f} to {self.case.group_bytes[1] / 1e6:.1f}"
        cells = (
            self.number,
            size,
            words(self.case, self.runs),
            verdict,
            micro,
            f"{self.seconds:.0f}",
            self.ended,
        )
        return f"| {' | '.join(map(str, cells))} |"


HEAD = (
    "| case | groups x MB | with | wrong groups | wrong micro-batches | seconds | ended by |\n"
    + "| --- " * 7
    + "|"
)


def words(case: Case, runs: int) -> str:
    """What a case has besides plain steps."""
    plain = Case()
    said = ["two runs"] if runs > 1 else []
    sizes = ("steps", "batch", "group_bytes", "seed", "concurrency", "prompt")
    for field in fields(Case):
        value = getattr(case, field.name)
        if field.name not in sizes and value != getattr(plain, field.name):
            name = field.name.replace("_", " ")
            said.append(name if value is True else f"{name} {value}")
    return ", ".join(said) or "nothing"


def try_case(number: int, case: Case, runs: int, url: str, base: Path, model_dir: Path) -> Row:
    """Run one case on the server, and compare. What ends it is a fault as well."""
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
        ended = f"{type(error).__name__}: {str(error)[:80]}"
    verdicts = [world.judge() for world in worlds]
    for verdict in verdicts:
        if verdict.faults:
            say(str(verdict))
    shutil.rmtree(folder)
    return Row(
        number,
        case,
        runs,
        time.monotonic() - began,
        sum(verdict.groups for verdict in verdicts),
        sum(verdict.micro_batches for verdict in verdicts),
        sum(verdict.wrong_groups for verdict in verdicts),
        sum(verdict.wrong_micro_batches for verdict in verdicts),
        ended,
    )


def cases(dice: random.Random, most_bytes: int) -> Iterator[tuple[Case, int]]:
    """Cases and how many runs of each are trained in turns: the largest sizes first."""
    for case in largest_cases(most_bytes):
        yield case, 1
    while True:
        case = random_case(dice, most_bytes)
        two = dice.random() < 0.25 and case.ranks == 1 and case.batch_bytes < most_bytes // 4
        yield case, 2 if two else 1


def run(seconds: float, seed: int, most_bytes: int, folder: Path) -> list[Row]:
    """Run cases until the time is up, one at least; each with an empty server."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    model_dir = build_model(folder, layers=1)
    end = time.monotonic() + seconds
    rows: list[Row] = []
    say(f"seed {seed}\n{HEAD}")
    for number, (case, runs) in enumerate(cases(random.Random(seed), most_bytes), 1):
        if rows and time.monotonic() + longest(rows) > end:
            break
        with EmbeddedServer(folder / f"server-{number}") as server:
            rows.append(try_case(number, case, runs, server.url, folder, model_dir))
        shutil.rmtree(folder / f"server-{number}")
        say(rows[-1].line())
        (folder / "truth.md").write_text(
            "\n".join([HEAD, *(row.line() for row in rows)]) + "\n", encoding="utf-8"
        )
    wrong = [row for row in rows if not row.is_clean]
    tokens = sum(row.groups * sum(row.case.group_bytes) // 2 for row in rows) // TOKEN_BYTES
    say(
        f"{len(rows)} cases, {sum(row.groups for row in rows)} groups, about {tokens / 1e6:.0f} million tokens: "
        f"{'all as they were made' if not wrong else f'{len(wrong)} cases are WRONG'}"
    )
    return rows


def longest(rows: Sequence[Row]) -> float:
    """Seconds of the longest case so far."""
    return max(row.seconds for row in rows)


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.truth", description="Is what is trained what was sampled?"
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
    rows = run(asked.seconds, asked.seed, int(asked.most_bytes), asked.folder.resolve())
    return 0 if all(row.is_clean for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
