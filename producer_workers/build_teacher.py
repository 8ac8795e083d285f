"""Build the worker of a teacher from a config."""

from __future__ import annotations

import numpy as np

from buffer.errors import ConfigError, ModelError
from buffer.run import Run
from producer_workers.build import worker_facts
from producer_workers.config.producing import ProducingConfig
from producer_workers.engines.base import Engine, GenerationError, ScoresTexts, context_length
from producer_workers.engines.model_folder import vocabulary_size
from producer_workers.worker.teacher import Teacher
from producer_workers.worker.worker import Worker


async def make_teacher(
    config: ProducingConfig,
    run: Run,
    engine: Engine,
    worker_id: str,
    teacher: str,
    *,
    restarts: int = 0,
) -> Worker:
    """Return a worker that scores groups as `teacher`. Raises ConfigError, ModelError."""
    top_k = {
        name: task.teachers[teacher].top_k
        for name, task in config.tasks.items()
        if teacher in task.teachers
    }
    if problem := config.context_problem(context_length(engine), top_k):
        raise ConfigError(f"teacher {teacher}: {problem}")
    if not isinstance(engine, ScoresTexts):
        raise ConfigError(f"the engine {engine.name} cannot score texts, as teacher {teacher} must")
    try:  # a server may lack the option
        await engine.score("probe", np.array([0, 1, 2], "<i4"), 1, max(top_k.values()))
    except GenerationError as error:
        raise ModelError(f"teacher {teacher}: {error.message}", hint=error.hint) from error
    return Worker(
        run,
        engine,
        {},
        worker_id=worker_id,
        concurrency=config.worker.concurrency,
        drain_timeout_s=config.worker.drain_timeout_s,
        facts=worker_facts(restarts) | {"teaches": teacher},
        teacher=Teacher(teacher, top_k, vocabulary_size(config.model_folder)),
    )
