"""Sums of two digits: problems by their number, and a small model that solves some of them."""

from __future__ import annotations

import random
from pathlib import Path

from consumer.config.warm_start import TinyModelConfig, WarmStartConfig
from consumer.grpo.models.tiny_model import build_tiny_model
from consumer.grpo.models.warm_start import Demonstration, warm_start

MAX_TOKENS = 5
"""An answer is a sign, two digits and the end."""


def problem(number: int, seed: int = 0) -> Demonstration:
    """`3 - 4 =`: the one of that number."""
    draw = random.Random(f"{seed}/{number}")
    first = draw.randrange(10)
    second = draw.randrange(10)
    sign = draw.choice("+-")
    total = first + second if sign == "+" else first - second
    return Demonstration([{"role": "user", "content": f"{first} {sign} {second} ="}], str(total))


def make_model(folder: Path, *, stop_accuracy: float = 0.4, seed: int = 1) -> Path:
    """`<folder>/model`: a random one after a supervised phase that stops early, on purpose."""
    path = folder / "model"
    if not path.exists():
        build_tiny_model(
            folder / "model.random", TinyModelConfig(phrases=(" + ", " - ", " =")), seed
        )
        problems = [problem(-1 - number) for number in range(2000)]
        warm_start(
            folder / "model.random",
            path,
            problems,
            WarmStartConfig(stop_accuracy=stop_accuracy, seed=seed),
        )
    return path
