"""Sums: problems by their number, and a small model that solves some of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rolloutmq.config.small_model import TinyModelConfig, WarmStartConfig
from rolloutmq.extensions.demo.tiny_model import build_tiny_model
from rolloutmq.extensions.demo.warm_start import Demonstration, warm_start


@dataclass(frozen=True, slots=True)
class Problems:
    """`demonstrate(number, seed)`: the problem of that number, and its answer.

    Prompts are of one length. `max_tokens`: of an answer, with its end. `warm_start`: what a model
    learns before GRPO.
    """

    demonstrate: Callable[[int, int], Demonstration]
    max_tokens: int
    warm_start: WarmStartConfig


def two_terms(number: int, seed: int = 0) -> Demonstration:
    """`3 - 4 =`, answered by `-1`."""
    draw = random.Random(f"{seed}/{number}")
    first = draw.randrange(10)
    second = draw.randrange(10)
    sign = draw.choice("+-")
    total = first + second if sign == "+" else first - second
    return Demonstration([{"role": "user", "content": f"{first} {sign} {second} ="}], str(total))


MOST_TERMS = 12


def running(number: int, seed: int = 0) -> Demonstration:
    """`786.........+`, answered by the sum modulo 10 up to each digit, `751`.

    A hard problem, three of ten, has twelve digits and another rule, `-`: the difference.
    """
    draw = random.Random(f"{seed}/{number}")
    is_hard = draw.random() < 0.3
    terms = [draw.randrange(10) for _ in range(MOST_TERMS if is_hard else draw.randint(2, 3))]
    return _digit_by_digit(terms, MOST_TERMS, "-" if is_hard else "+")


def _digit_by_digit(terms: Sequence[int], width: int, operator: Literal["+", "-"]) -> Demonstration:
    sign = 1 if operator == "+" else -1
    ends = range(1, len(terms) + 1)
    results = [(terms[0] + sign * sum(terms[1:end])) % 10 for end in ends]
    text = "".join(map(str, terms)).ljust(width, ".") + operator
    return Demonstration([{"role": "user", "content": text}], "".join(map(str, results)))


LONG_TERMS = 8


def long_running(number: int, seed: int = 0) -> Demonstration:
    """`78612345+`, answered by the sum modulo 10 up to each digit, `75124916`."""
    draw = random.Random(f"{seed}/{number}")
    return _digit_by_digit([draw.randrange(10) for _ in range(LONG_TERMS)], LONG_TERMS, "+")


SUMS = Problems(two_terms, 5, WarmStartConfig(stop_accuracy=0.4, seed=1))
"""Each answer is a sign, two digits and the end."""

RUNNING_SUMS = Problems(
    running, MOST_TERMS + 2, WarmStartConfig(stop_accuracy=0.74, check_every_steps=5, seed=1)
)
"""The longer the answer, the harder: one wrong digit spoils it."""


LONG_SUMS = Problems(
    long_running, LONG_TERMS + 2, WarmStartConfig(stop_accuracy=0.05, check_every_steps=5, seed=2)
)
"""A student knows hardly any of them."""


def make_model(folder: Path, problems: Problems = SUMS) -> Path:
    """`<folder>/model`: a random one after a supervised phase that stops early, on purpose."""
    path = folder / "model"
    if not path.exists():
        build_tiny_model(folder / "model.random", TinyModelConfig(phrases=(" + ", " - ", " =")), 1)
        demonstrations = [problems.demonstrate(-1 - number, 0) for number in range(2000)]
        warm_start(folder / "model.random", path, demonstrations, problems.warm_start)
    return path
