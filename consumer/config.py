"""The config file as the training side reads it: the shared sections, and [trainer], [learner], [tiny_model],
[warm_start], [evaluation]."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from buffer.config import Section
from buffer.config_file import ConfigFile
from buffer.errors import ConfigError
from buffer.run_config import ReasoningGymDataset
from consumer.advantages import AdvantageEstimator
from consumer.learner_config import LearnerConfig
from consumer.tiny_model_config import TinyModelConfig
from consumer.warm_start_config import WarmStartConfig


class TrainerSection(Section):
    """[trainer]: the loop around the learner."""

    advantages: AdvantageEstimator = "grpo"
    """what a reward says compared with the other rollouts of its prompt: grpo or dr_grpo"""
    checkpoint_every_steps: int = Field(5, ge=1)
    """a restart repeats at most so many steps"""
    keep_checkpoints: int = Field(2, ge=1)
    """older ones are deleted; batches since the oldest kept one can be delivered again"""
    keep_weights: int = Field(3, ge=2)
    """published versions that stay on disk, for workers that are a little behind"""
    device: str = "auto"
    """auto, cpu or cuda"""


class EvaluationSection(Section):
    """[evaluation]: of the first and the last weights, on every held-out task."""

    groups: int | None = Field(None, ge=1)
    """problems per evaluation; default: all held-out ones, which alone asks the same ones each time"""


class TrainingConfig(ConfigFile):
    """What the trainer needs."""

    trainer: TrainerSection = TrainerSection()
    learner: LearnerConfig = LearnerConfig()
    tiny_model: TinyModelConfig = TinyModelConfig()
    warm_start: WarmStartConfig = WarmStartConfig()
    evaluation: EvaluationSection = EvaluationSection()

    def evaluation_size(self, task: str) -> int:
        """Problems of one evaluation of `task`. ConfigError where its file cannot be read."""
        if self.evaluation.groups is not None:
            return self.evaluation.groups
        dataset = self.tasks[task].dataset
        return dataset.held_out_size if isinstance(dataset, ReasoningGymDataset) else _count_problems(dataset.path)


def _count_problems(file: Path) -> int:
    try:
        with file.open("rb") as lines:
            return sum(1 for line in lines if line.strip())
    except OSError as error:
        raise ConfigError(f"{file}: cannot be opened: {error.strerror}", hint="see the task's dataset.path") from error
