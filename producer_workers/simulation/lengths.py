"""Supply response lengths, a pure function of (seed, n): all settings get the same work."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import orjson

from buffer.errors import DatasetError
from producer_workers.config.distribution import Distribution

Lengths = Callable[[int], list[int]]  # returns the tokens of each rollout of draw n, at least 1


def drawn_lengths(
    distribution: Distribution, group_size: int, *, longest: int, seed: int = 0
) -> Lengths:
    @cache  # settings are compared on the same draws
    def lengths(draw: int) -> list[int]:
        rng = np.random.default_rng([seed, draw])
        return [min(max(1, round(distribution.draw(rng))), longest) for _ in range(group_size)]

    return lengths


def picked_lengths(tokens: list[int], group_size: int, *, seed: int = 0) -> Lengths:
    """Pick lengths from a list, each rollout by itself."""

    @cache
    def lengths(draw: int) -> list[int]:
        picks = np.random.default_rng([seed, draw]).integers(0, len(tokens), group_size)
        return [tokens[pick] for pick in picks]

    return lengths


def trace_lengths(path: Path, token_s: float, group_size: int, *, seed: int = 0) -> Lengths:
    """Pick lengths from those in a file. Raises DatasetError."""
    return picked_lengths(read_trace(path, token_s), group_size, seed=seed)


def read_trace(path: Path, token_s: float) -> list[int]:
    """Read the tokens of each line of a JSONL file: 812, {"tokens": 812}, or {"seconds": 9.5}.

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
        raise DatasetError(
            f"{path} holds no lengths", hint='expected one {"tokens": 812} in each line'
        )
    return tokens


def _tokens(path: Path, number: int, line: bytes, token_s: float) -> int:
    hint = 'expected a number of tokens, {"tokens": 812} or {"seconds": 9.5}, above 0'
    try:
        value = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise DatasetError(f"{path}, line {number}: {error}", hint=hint) from error
    if isinstance(value, dict):
        value = value["tokens"] if "tokens" in value else value.get("seconds", 0) / token_s
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise DatasetError(f"{path}, line {number}: no length in {line[:80]!r}", hint=hint)
    return max(1, round(value))
