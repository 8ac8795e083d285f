"""How many examples a property is tried with: all in `make test-slow`, a quarter in `make test`."""

from __future__ import annotations

from hypothesis import settings

ALL = 100
"""Examples where a test names no number, as Hypothesis has it."""

QUICK = settings(deadline=None, max_examples=ALL // 4)
THOROUGH = settings(deadline=None, max_examples=ALL)


def examples(number: int) -> int:
    """Return a share of the number: `--hypothesis-profile=thorough` asks for all of it."""
    return number * settings().max_examples // ALL
