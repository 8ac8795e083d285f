"""Run inference engines for a rollout worker. Importing this package imports no engine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from buffer.rollouts.rollout import PolicyVersion
    from producer_workers.config.engine import EngineConfig
    from producer_workers.engines.base import Engine


def build_engine(config: EngineConfig, model_dir: Path, version: PolicyVersion) -> Engine:
    """Build the engine of `config` without starting it.

    `version` names the weights that `model_dir` holds.
    """
    if config.kind == "simulated":
        from producer_workers.engines.model_folder import eos_ids, vocabulary_size
        from producer_workers.engines.simulated import SimulatedEngine

        size, ends = vocabulary_size(model_dir), sorted(eos_ids(model_dir))
        of_model = {"vocab_size": size, "eos_token_id": ends[0] if ends else None}
        given = config.model_dump(include=set(of_model), exclude_none=True)
        return SimulatedEngine(config.model_copy(update=of_model | given), version)
    if config.kind == "http":
        from producer_workers.engines.http.engine import HttpEngine

        return HttpEngine(config, model_dir, version)
    if config.kind == "transformers":
        from producer_workers.engines.hf.engine import TransformersEngine

        return TransformersEngine(config, model_dir, version)
    from producer_workers.engines.vllm.engine import VllmEngine

    return VllmEngine(config, model_dir, version)
