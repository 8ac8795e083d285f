"""Inference engines of a rollout worker. Importing this package imports no engine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from buffer.imports import load_object

if TYPE_CHECKING:
    from buffer.wire.rollout import PolicyVersion
    from producer_workers.config.engine import EngineConfig, PythonConfig
    from producer_workers.engines.base import Engine


def build_engine(config: EngineConfig, model_dir: Path, version: PolicyVersion) -> Engine:
    engine: Engine = load_object(config.built_by, kind="engine")(config, model_dir, version)
    return engine


def build_yours(config: PythonConfig, model_dir: Path, version: PolicyVersion) -> Engine:
    engine: Engine = load_object(config.factory, kind="engine")(config, model_dir, version)
    return engine
