"""What a trainer reads of a config."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Protocol

from buffer.config.run_settings import PolicySection, RunSection
from consumer.config.learner import CriticConfig, LearnerConfig
from consumer.config.trainer import (
    AuditSection,
    EvaluationSection,
    SamplesSection,
    TrainerSection,
    WandbSection,
)


class TrainingConfig(Protocol):
    """The sections that a trainer or an auditor reads, and what others say about the run."""

    @property
    def run(self) -> RunSection: ...
    @property
    def policy(self) -> PolicySection: ...
    @property
    def trainer(self) -> TrainerSection: ...
    @property
    def learner(self) -> LearnerConfig: ...
    @property
    def critic(self) -> CriticConfig: ...
    @property
    def evaluation(self) -> EvaluationSection: ...
    @property
    def audit(self) -> AuditSection: ...
    @property
    def samples(self) -> SamplesSection: ...
    @property
    def wandb(self) -> WandbSection: ...
    @property
    def tasks(self) -> Collection[str]: ...
    @property
    def model_folder(self) -> Path: ...
    @property
    def teacher_weights(self) -> Mapping[str, Mapping[str, float]]:
        """Return the weight of each teacher of each task."""
        ...

    @property
    def worker_gpus(self) -> int:
        """Return the number of GPUs that sample."""
        ...

    @property
    def has_model(self) -> bool:
        """Return whether the engine samples from a model, and not from random numbers."""
        ...

    def evaluation_size(self, task: str) -> int:
        """Return the number of problems of one evaluation. Raises ConfigError."""
        ...

    def public(self) -> dict[str, Any]:
        """Return all values as JSON, without secrets."""
        ...
