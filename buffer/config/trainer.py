"""The config file as the training side reads it.

It has the shared sections, and [trainer], [learner], [critic], [tiny_model], [warm_start] and
[evaluation].
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from buffer.config.config import ConfigFile
from buffer.config.dataset import JsonlDataset, ReasoningGymDataset
from buffer.config.learner import AdvantageEstimator, CriticConfig, LearnerConfig
from buffer.config.loader import Section
from buffer.config.warm_start import TinyModelConfig, WarmStartConfig
from buffer.errors import ConfigError


class TrainerSection(Section):
    """[trainer]: the loop around the learner.

    Usage:

        TrainerSection(advantages="rloo", checkpoint_every_steps=10)
    """

    loop: str | None = None
    """a trainer of your own, "module:function" (see consumer/examples); None: the reference trainer"""
    flow: Literal["disaggregated", "colocated"] = "disaggregated"
    """disaggregated: workers generate while the trainer trains. colocated: workers are paused from
    the take of a batch until the new weights are published ([policy] pause_mode abort or drain),
    and may sleep ([worker] sleep_when_paused)"""
    advantages: AdvantageEstimator | Literal["gae"] = "grpo"
    """how a reward becomes an advantage: compared with the other rollouts of its prompt (grpo,
    dr_grpo, rloo, opo, pass_at_k), with the batch (reinforce_pp, reinforce_pp_baseline), or with
    the values of a critic (gae, see [critic])"""
    overlong_buffer_tokens: int | None = Field(None, ge=1)
    """scores fall linearly, by up to 1, over this many tokens before a response's max_tokens
    (DAPO); None: no penalty"""
    max_sequence_tokens: int | None = Field(None, ge=1)
    """rollouts with more tokens than this, prompt included, are not trained
    (consumer/training/batch_filter.py); None: no limit"""
    mask_truncated: bool = False
    """rollouts that reached their max_tokens are not trained; their scores still count for the
    others"""
    checkpoint_every_steps: int = Field(5, ge=1)
    """train steps between two checkpoints; a restart repeats at most this many"""
    keep_checkpoints: int = Field(2, ge=1)
    """number of checkpoints kept; batches since the oldest one can be delivered again"""
    keep_weights: int = Field(3, ge=2)
    """published versions kept on disk, for workers that still load an older one"""
    producer_timeout_s: float | None = Field(120.0, gt=0)
    """how long the trainer waits for a batch without a live producer before it ends with an error;
    None: forever"""
    device: str = "auto"
    """auto, cpu or cuda"""
    writers: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """destinations of metrics beside steps.jsonl: tensorboard (needs tensorboardX), wandb"""

    @property
    def is_gae(self) -> bool:
        """Return whether there is a critic."""
        return self.advantages == "gae"


class EvaluationSection(Section):
    """[evaluation]: of the first and the last weights, and some between, on every held-out task.

    Usage:

        EvaluationSection(every_steps=20, flow="background")
    """

    every_steps: int | None = Field(None, ge=1)
    """interval in train steps, a multiple of [policy] sync_weights_interval; None: only the first
    and the last weights"""
    flow: Literal["foreground", "exclusive", "background"] = "foreground"
    """foreground: the trainer waits for the result, and workers prefer evaluation jobs to training
    jobs. exclusive: training jobs are paused meanwhile, after new weights are published and before
    the run continues ([policy] pause_mode abort or drain). background: the trainer continues"""

    groups: int | None = Field(None, ge=1)
    """problems per evaluation; None: all held-out ones. Only then are they the same each time"""


class TrainingConfig(ConfigFile):
    """The config file of a trainer.

    Usage:

        config = load_config(TrainingConfig, Path("configs/demo.toml"), ["run.name=mine"])
    """

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
            raise ValueError(
                "[trainer] flow = colocated needs [policy] pause_mode abort or drain: keep frees nothing"
            )
        return self

    @model_validator(mode="after")
    def _engine_takes_what_is_published(self) -> TrainingConfig:
        """Check that the trainer publishes adapters exactly where the engine loads adapters.

        The engine's section belongs to the workers; a trainer of your own may publish either.
        """
        engine = self.engine if isinstance(self.engine, dict) else {}
        lora = self.learner.lora
        kind = engine.get("kind", "vllm")
        most = engine.get("max_lora_rank")
        is_wanted = engine.get("weights") == "adapters" if kind == "http" else bool(most)
        if lora and kind == "vllm" and not (isinstance(most, int) and most >= lora.rank):
            raise ValueError(
                f"[learner.lora] rank = {lora.rank} needs [engine] max_lora_rank, of that or more"
            )
        if lora and kind == "http" and not is_wanted:
            raise ValueError("[learner.lora] needs [engine] weights = 'adapters'")
        if is_wanted and lora is None and self.trainer.loop is None:
            raise ValueError(
                "[engine] wants adapters, and there is no [learner.lora]: nobody would publish any"
            )
        return self

    @model_validator(mode="after")
    def _temperatures_agree(self) -> TrainingConfig:
        """Check that the trainer computes the distribution that rollouts are sampled from."""
        mine = self.learner.temperature
        for name, task in self.tasks.items():
            if self.trainer.loop is None and not task.eval_of and task.sample.temperature != mine:
                said = f"task {name} is sampled with temperature {task.sample.temperature:g}, [learner] temperature is"
                raise ValueError(f"{said} {mine:g}: both must be the same")
        return self

    @model_validator(mode="after")
    def _prompts_are_texts(self) -> TrainingConfig:
        shown = [
            n
            for n, task in self.tasks.items()
            if not task.eval_of and getattr(task.dataset, "images", None)
        ]
        if shown and self.trainer.loop is None:
            raise ValueError(
                f"task {shown[0]} shows images, which only a [trainer] loop of yours can train on"
            )
        return self

    @model_validator(mode="after")
    def _evaluation_fits(self) -> TrainingConfig:
        section = self.evaluation
        interval = self.policy.sync_weights_interval
        if section.every_steps is not None and section.every_steps % interval:
            raise ValueError(
                f"[evaluation] every_steps: not a multiple of [policy] sync_weights_interval = {interval}"
            )
        if section.flow == "exclusive" and self.policy.pause_mode == "keep":
            raise ValueError(
                "[evaluation] flow = exclusive needs [policy] pause_mode abort or drain: keep freezes all"
            )
        return self

    def evaluation_size(self, task: str) -> int:
        """Return the number of problems of one evaluation of `task`.

        Raises ConfigError where they cannot be counted.
        """
        if self.evaluation.groups is not None:
            return self.evaluation.groups
        dataset = self.tasks[task].dataset
        match dataset:
            case ReasoningGymDataset():
                return dataset.held_out_size
            case JsonlDataset():
                return _count_problems(dataset.path)
        hint = "set [evaluation] groups to the number of its problems"
        raise ConfigError(
            f"task {task}: problems of kind {dataset.kind} are not counted here", hint=hint
        )


def _count_problems(file: Path) -> int:
    try:
        with file.open("rb") as lines:
            return sum(1 for line in lines if line.strip())
    except OSError as error:
        raise ConfigError(
            f"{file}: cannot be opened: {error.strerror}", hint="see the task's dataset.path"
        ) from error
