"""What a run of the truth test is made of."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from buffer.groups.submit import GROUPS_PER_TRIP

TOKEN_BYTES = 8
"""An id and a logprob."""


@dataclass(frozen=True, slots=True)
class Case:
    """One run. `group_bytes`: least and most of a group, about. `held`: batches that a trainer holds while it takes
    later ones. `cuts`: replies to uploads of workers are cut. `restart_after`: the step
    after which the trainer dies; what was not committed is delivered again.
    """

    steps: int = 3
    batch: int = 12
    members: int = 4
    group_bytes: tuple[int, int] = (1_048_576, 1_048_576)
    prompt: int = 700
    turns: int = 1
    interruptions: int = 0
    workers: int = 1
    concurrency: int = 4
    cuts: bool = False
    prefetch_bytes: int = 0
    held: int = 0
    evaluates: int = 0
    is_async: bool = False
    restart_after: int = 0
    ranks: int = 1
    updates: int = 1
    seed: int = 0

    @property
    def request_tokens(self) -> tuple[int, int]:
        """Tokens of a request, least and most. An interrupted member has more than one of them."""
        least, most = (
            size // TOKEN_BYTES // self.members // self.turns for size in self.group_bytes
        )
        return max(1, least), max(1, most)

    @property
    def trip_bytes(self) -> int:
        """More than a worker uploads at once."""
        return 2 * min(self.batch, GROUPS_PER_TRIP) * self.group_bytes[1]

    @property
    def batch_bytes(self) -> int:
        return self.batch * sum(self.group_bytes) // 2


def largest_cases(most_bytes: int) -> Iterator[Case]:
    """The largest groups, and the most of middle size, that `most_bytes` allow for a batch."""
    plain = Case(steps=2, members=8, held=1, concurrency=8)
    for size in (20_000_000, 1_300_000):
        yield replace(plain, batch=max(2, most_bytes // size), group_bytes=(size, size))


def random_case(dice: random.Random, most_bytes: int) -> Case:
    """A case whose batches have at most `most_bytes`."""
    least = int(10 ** dice.uniform(5, 7.3))
    most = min(20_000_000, int(least * dice.uniform(1.0, 2.5)))
    batch = max(2, min(dice.randint(4, 96), most_bytes // most))
    ranks = dice.choice([1, 1, 1, 2])
    case = Case(
        steps=dice.randint(2, 4),
        batch=batch,
        members=dice.choice([2, 4, 8]),
        group_bytes=(least, most),
        prompt=dice.choice([16, 700, 9_000]),
        turns=dice.choice([1, 1, 2, 3]),
        interruptions=dice.choice([0, 0, 1, 2]),
        workers=dice.choice([1, 2]),
        concurrency=dice.choice([2, 4, 8, 16]),
        cuts=dice.random() < 0.3,
        prefetch_bytes=dice.choice([0, 64 << 20, 512 << 20]),
        held=dice.choice([0, 0, 1, 2]),
        evaluates=dice.choice([0, 0, 4]),
        is_async=dice.random() < 0.3,
        restart_after=dice.choice([0, 0, 1]),
        updates=dice.choice([1, 1, 2]),
        seed=dice.randrange(1 << 30),
    )
    # the ranks' trainer is a program of its own, which does the plain things
    return (
        case
        if ranks == 1
        else replace(case, ranks=ranks, held=0, is_async=False, evaluates=0, restart_after=0)
    )
