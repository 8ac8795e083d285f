"""What the tests of the training side share: a model of some thousand weights, and groups made by chance."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from buffer.group import RolloutGroup
from buffer.rollout import RolloutState, Status
from consumer.tiny_model import build_tiny_model
from consumer.tiny_model_config import TinyModelConfig

SPEC = TinyModelConfig(hidden=32, layers=2, heads=2, kv_heads=1, head_dim=32, intermediate=48)


def build_model(folder: Path, *, seed: int = 0) -> Path:
    """A tiny model folder below `folder`."""
    path = folder / f"model-{seed}"
    build_tiny_model(path, SPEC, seed)
    return path


def make_group(seed: int, *, prompt: int = 6, lengths: Sequence[int] = (3, 5, 1, 4)) -> RolloutGroup:
    """A group of random tokens, logprobs, masks and scores 0 or 1."""
    draw = np.random.default_rng(seed)
    prompt_ids = draw.integers(6, 90, prompt)
    states = [
        RolloutState(
            index=index,
            prompt_ids=prompt_ids,
            response_ids=draw.integers(6, 90, length),
            logprobs=draw.uniform(-5, -3, length),
            response_mask=draw.random(length) > 0.2,
            reward={"score": float(index % 2)},
            status=Status.COMPLETED,
        )
        for index, length in enumerate(lengths)
    ]
    return RolloutGroup(f"task-{seed:010d}", "task", states)
