"""The config file as the training side reads it: the shared sections, and [trainer], [learner], [critic],
[tiny_model], [warm_start], [evaluation]."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from buffer.config.dataset import JsonlDataset, ReasoningGymDataset
from buffer.config.file import ConfigFile
from buffer.config.loader import Section
from buffer.errors import ConfigError
from consumer.advantages import AdvantageEstimator
from consumer.critic_config import CriticConfig
from consumer.learner_config import LearnerConfig
from consumer.tiny_model_config import TinyModelConfig
from consumer.warm_start_config import WarmStartConfig


class TrainerSection(Section):
    """[trainer]: the loop around the learner."""

    loop: str | None = None
    """a trainer of yours in place of the reference one: "module:function" (consumer/examples has two)"""
    flow: Literal["disaggregated", "colocated"] = "disaggregated"
    """disaggregated: workers go on while it trains. colocated: from when a batch is taken until the new weights are
    published they are paused ([policy] pause_mode abort or drain), and may sleep ([worker] sleep_when_paused)"""
    advantages: AdvantageEstimator | Literal["gae"] = "grpo"
    """what a reward says compared with the other rollouts of its prompt: grpo, dr_grpo, rloo, opo, pass_at_k; or
    with the batch: reinforce_pp, reinforce_pp_baseline; or with what a critic expected: gae ([critic])"""
    overlong_buffer_tokens: int | None = Field(None, ge=1)
    """scores fall linearly, by up to 1, over so many tokens before a response's max_tokens (DAPO); None: they do not"""
    max_sequence_tokens: int | None = Field(None, ge=1)
    """rollouts longer than this, with their prompt, are not trained (consumer/batch_filter.py); None: all are"""
    mask_truncated: bool = False
    """rollouts that ran into their max_tokens are not trained; their scores still count for the others"""
    checkpoint_every_steps: int = Field(5, ge=1)
    """a restart repeats at most so many steps"""
    keep_checkpoints: int = Field(2, ge=1)
    """older ones are deleted; batches since the oldest kept one can be delivered again"""
    keep_weights: int = Field(3, ge=2)
    """published versions that stay on disk, for workers that are a little behind"""
    producer_timeout_s: float | None = Field(120.0, gt=0)
    """how long a batch is awaited while no producer lives, before the trainer ends and says so; None: for ever"""
    device: str = "auto"
    """auto, cpu or cuda"""
    writers: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """where metrics go beside steps.jsonl: tensorboard (needs tensorboardX), wandb"""

    @property
    def is_gae(self) -> bool:
        """Whether there is a critic."""
        return self.advantages == "gae"


class EvaluationSection(Section):
    """[evaluation]: of the first and the last weights, and of those between, on every held-out task."""

    every_steps: int | None = Field(None, ge=1)
    """also the weights after every so many train steps, a multiple of [policy] sync_weights_interval; None: only the
    first and the last"""
    flow: Literal["foreground", "exclusive", "background"] = "foreground"
    """foreground: the trainer waits for it, ahead of the workers' training work. exclusive: training work is paused
    meanwhile, after new weights and before the run continues ([policy] pause_mode abort or drain). background: the
    trainer goes on"""

    groups: int | None = Field(None, ge=1)
    """problems per evaluation; default: all held-out ones, which alone asks the same ones each time"""


class TrainingConfig(ConfigFile):
    """What the trainer needs."""

    trainer: TrainerSection = TrainerSection()
    learner: LearnerConfig = LearnerConfig()
    critic: CriticConfig = CriticConfig()
    tiny_model: TinyModelConfig = TinyModelConfig()
    warm_start: WarmStartConfig = WarmStartConfig()
    evaluation: EvaluationSection = EvaluationSection()

    def batches_until_freed(self) -> int:
        # a commit frees what is older than the oldest checkpoint that is kept
        return self.trainer.checkpoint_every_steps * self.trainer.keep_checkpoints

    @model_validator(mode="after")
    def _pause_frees_the_device(self) -> TrainingConfig:
        if self.trainer.flow == "colocated" and self.policy.pause_mode == "keep":
            raise ValueError("[trainer] flow = colocated needs [policy] pause_mode abort or drain: keep frees nothing")
        return self

    @model_validator(mode="after")
    def _engine_takes_what_is_published(self) -> TrainingConfig:
        """Adapters where it wants adapters. The engine's section is the other side's; a loop of yours may do either."""
        engine, lora = self.engine if isinstance(self.engine, dict) else {}, self.learner.lora
        kind, most = engine.get("kind", "vllm"), engine.get("max_lora_rank")
        is_wanted = engine.get("weights") == "adapters" if kind == "http" else bool(most)
        if lora and kind == "vllm" and not (isinstance(most, int) and most >= lora.rank):
            raise ValueError(f"[learner.lora] rank = {lora.rank} needs [engine] max_lora_rank, of that or more")
        if lora and kind == "http" and not is_wanted:
            raise ValueError("[learner.lora] needs [engine] weights = 'adapters'")
        if is_wanted and lora is None and self.trainer.loop is None:
            raise ValueError("[engine] wants adapters, and there is no [learner.lora]: nobody would publish any")
        return self

    @model_validator(mode="after")
    def _temperatures_agree(self) -> TrainingConfig:
        """Else what the trainer computes again is another distribution than the one that was sampled from."""
        mine = self.learner.temperature
        for name, task in self.tasks.items():
            if self.trainer.loop is None and not task.eval_of and task.sample.temperature != mine:
                said = f"task {name} is sampled with temperature {task.sample.temperature:g}, [learner] temperature is"
                raise ValueError(f"{said} {mine:g}: both must be the same")
        return self

    @model_validator(mode="after")
    def _prompts_are_texts(self) -> TrainingConfig:
        shown = [n for n, task in self.tasks.items() if not task.eval_of and getattr(task.dataset, "images", None)]
        if shown and self.trainer.loop is None:
            raise ValueError(f"task {shown[0]} shows images, which only a [trainer] loop of yours can train on")
        return self

    @model_validator(mode="after")
    def _evaluation_fits(self) -> TrainingConfig:
        section, interval = self.evaluation, self.policy.sync_weights_interval
        if section.every_steps is not None and section.every_steps % interval:
            raise ValueError(f"[evaluation] every_steps: not a multiple of [policy] sync_weights_interval = {interval}")
        if section.flow == "exclusive" and self.policy.pause_mode == "keep":
            raise ValueError("[evaluation] flow = exclusive needs [policy] pause_mode abort or drain: keep freezes all")
        return self

    def evaluation_size(self, task: str) -> int:
        """Problems of one evaluation of `task`. ConfigError where its file cannot be read."""
        if self.evaluation.groups is not None:
            return self.evaluation.groups
        dataset = self.tasks[task].dataset
        match dataset:
            case ReasoningGymDataset():
                return dataset.held_out_size
            case JsonlDataset():
                return _count_problems(dataset.path)
        hint = "set [evaluation] groups to the number of its problems"
        raise ConfigError(f"task {task}: problems of kind {dataset.kind} are not counted here", hint=hint)


def _count_problems(file: Path) -> int:
    try:
        with file.open("rb") as lines:
            return sum(1 for line in lines if line.strip())
    except OSError as error:
        raise ConfigError(f"{file}: cannot be opened: {error.strerror}", hint="see the task's dataset.path") from error
