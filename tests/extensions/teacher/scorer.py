"""An engine of a teacher that a test can watch, and configs with teachers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from buffer.wire.rollout import PolicyVersion
from producer_workers.config.engine import PythonConfig, SimulatedConfig
from producer_workers.engines.base import Scores
from producer_workers.engines.simulated import SimulatedEngine
from rolloutmq.config.config import Config
from rolloutmq.config.load import validate_config

TASK = "sums"


class Scorer(SimulatedEngine):
    """A simulated engine that notes the texts it is asked for.

    The first `deaths` of them soon die. Until `gate` is set, they give no answer.
    """

    made: ClassVar[list[Scorer]] = []
    deaths: ClassVar[int] = 0
    gate: ClassVar[asyncio.Event | None] = None

    def __init__(self, config: PythonConfig, _: Path, version: PolicyVersion) -> None:
        more = {"die_after": 2} if len(self.made) < self.deaths else {}
        own = {"vocab_size": 100, "first_token_s": {"shape": "fixed", "value": 0.0}}
        super().__init__(SimulatedConfig.model_validate(own | more | config.options), version)
        self.texts: list[list[int]] = []
        self.made.append(self)

    async def score(
        self, request_id: str, ids: NDArray[np.int32], start: int, top_k: int = 0
    ) -> Scores:
        if request_id != "probe":
            self.texts.append(ids.tolist())
            if self.gate:
                await self.gate.wait()
        return await super().score(request_id, ids, start, top_k)


def scored_by(**options: Any) -> dict[str, Any]:
    """Return the `engine` of a teacher that is a Scorer."""
    factory = f"{__name__}:Scorer"
    return {"kind": "python", "factory": factory, "options": options, "restarts": 1}


def config_of(
    model: Path, teachers: dict[str, Any], judging: dict[str, Any] | None = None
) -> Config:
    task = {
        "judge": "exact_match", "judging": judging or {}, "teachers": teachers,
        "dataset": {"kind": "jsonl", "path": "none.jsonl"}, "sample": {"max_tokens": 16},
    }  # fmt: skip
    tree = {
        "run": {"name": "taught"},
        "policy": {"model": str(model)},
        "tasks": {TASK: task},
        "engine": {"kind": "simulated"},
        "learner": {"distillation": {"top_k_loss": "forward"}},
    }
    if not any(each.get("top_k") for each in teachers.values()):
        tree["learner"] = {"distillation": {}}
    return validate_config(tree, "taught.toml")
