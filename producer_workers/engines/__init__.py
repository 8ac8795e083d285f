"""Inference engines of a rollout worker. Importing this package imports no engine."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from buffer.errors import ModelError
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


async def started(engine: Engine, timeout_s: float) -> Engine:
    """Start an engine and return it. Raises EngineError, and ModelError after `timeout_s`."""
    try:
        await asyncio.wait_for(engine.start(), timeout_s)
    except TimeoutError as error:
        await engine.shutdown()
        message = f"the engine {engine.name} did not start within {timeout_s:g} s"
        raise ModelError(message, hint="raise [worker] start_timeout_s") from error
    return engine
