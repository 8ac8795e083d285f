"""The config of a small run of the reference trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rolloutmq.config.config import Config

STEPS = 5
GROUPS = 3


def training_config(name: str, folder: Path, **changes: dict[str, Any]) -> Config:
    """Return a config of STEPS steps of GROUPS groups; `changes`: keys of sections."""
    dataset = {"kind": "jsonl", "path": "problems.jsonl"}
    sections: dict[str, dict[str, Any]] = {
        "run": {"name": name, "dir": folder, "seed": 3},
        "plan": {"steps": STEPS, "batch_size": GROUPS},
        "tasks": {"math": {"judge": "exact_match", "prompt_repeat_k": 4, "dataset": dataset}},
        "trainer": {"checkpoint_every_steps": 2, "keep_weights": 2, "device": "cpu"},
        "learner": {"learning_rate": 1e-3},
        "engine": {"kind": "vllm"},
    }
    for section, keys in changes.items():
        sections[section] = sections.get(section, {}) | keys
    return Config.model_validate(sections)
