"""How long the responses of a draw are: from a distribution, or from a trace of a run that was.

Invariant: the lengths of draw n depend on nothing but (seed, n), so every setting is asked about
the same work.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import orjson

from buffer.errors import DatasetError
from buffer.model.distributions import Distribution

Lengths = Callable[[int], list[int]]
"""Tokens of each rollout of draw n; at least 1."""


def drawn_lengths(
    distribution: Distribution, group_size: int, *, longest: int, seed: int = 0
) -> Lengths:
    """Lengths from a distribution, none over `longest`."""

    @cache  # settings are compared on the same draws
    def lengths(draw: int) -> list[int]:
        rng = np.random.default_rng([seed, draw])
        return [min(max(1, round(distribution.draw(rng))), longest) for _ in range(group_size)]

    return lengths


def picked_lengths(tokens: list[int], group_size: int, *, seed: int = 0) -> Lengths:
    """Lengths picked from a list, each rollout by itself."""

    @cache
    def lengths(draw: int) -> list[int]:
        picks = np.random.default_rng([seed, draw]).integers(0, len(tokens), group_size)
        return [tokens[pick] for pick in picks]

    return lengths


def trace_lengths(path: Path, token_s: float, group_size: int, *, seed: int = 0) -> Lengths:
    """Lengths picked from those in a file. Raises DatasetError."""
    return picked_lengths(read_trace(path, token_s), group_size, seed=seed)


def read_trace(path: Path, token_s: float) -> list[int]:
    """Tokens of each line of a JSONL file: a number, or {"tokens": 812}, or {"seconds": 9.5} of one
    response.

    Seconds become tokens at `token_s`. Raises DatasetError naming the line.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise DatasetError(f"{path} cannot be read: {error}") from error
    tokens = [
        _tokens(path, number, line, token_s) for number, line in enumerate(lines, 1) if line.strip()
    ]
    if not tokens:
        raise DatasetError(f"{path} holds no lengths", hint='one {"tokens": 812} in each line')
    return tokens


def _tokens(path: Path, number: int, line: bytes, token_s: float) -> int:
    hint = 'expected a number of tokens, {"tokens": 812} or {"seconds": 9.5}, above 0'
    try:
        said = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise DatasetError(f"{path}, line {number}: {error}", hint=hint) from error
    if isinstance(said, dict):
        said = said["tokens"] if "tokens" in said else said.get("seconds", 0) / token_s
    if isinstance(said, bool) or not isinstance(said, int | float) or said <= 0:
        raise DatasetError(f"{path}, line {number}: no length in {line[:80]!r}", hint=hint)
    return max(1, round(said))
