"""The training loop around the learner, and its reports."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

from pydantic import AfterValidator, Field

from buffer.config.run_settings import PolicySection, RunSection, WeightsSection
from buffer.config.section import YEAR_S, Count, DottedPath, FromList, Section
from buffer.imports import attached, is_dotted_path
from buffer.limits import Bytes
from consumer.config.critic import CriticConfig
from consumer.config.learner import LearnerConfig

WITHIN_A_GROUP = (
    *("grpo", "dr_grpo", "rloo", "opo", "pass_at_k", "reinforce_pp_baseline"),
    *("gdpo", "turns", "otb"),
)
"""Advantages that compare a rollout with the others of its prompt."""

ADVANTAGES = (*WITHIN_A_GROUP, "reinforce_pp", "gae", "none")


PASS_AT = 4
"""The k of advantages = pass_at_k: a group of k rollouts or fewer has no advantage."""


def _check_advantages(text: str) -> str:
    if text not in ADVANTAGES and not is_dotted_path(text):
        raise ValueError(f"it is not one of {', '.join(ADVANTAGES)}, nor package.module:function")
    return text


METRIC_WRITERS = "rolloutmq.metric_writers"
"""The group of entry points whose classes are metric writers, by the name that a config gives."""


def _check_writer(name: str) -> str:
    if name not in (known := attached(METRIC_WRITERS)):
        raise ValueError(f"it is not one of {', '.join(known)}")
    return name


WriterName = Annotated[str, AfterValidator(_check_writer)]


LEARNING = "learning/"
"""How the names of findings about learning begin."""

LearningFinding = Literal[
    "learning/reward_falls", "learning/equal_rewards", "learning/no_advantage",
    "learning/no_gradient", "learning/gradient_not_finite", "learning/gradient_clipped",
    "learning/entropy_collapse", "learning/entropy_explosion", "learning/policy_jump",
    "learning/mismatch", "learning/same_response", "learning/looping",
    "learning/judge_disagreement", "learning/one_part", "learning/response_limit",
    "learning/length_without_reward", "learning/held_out_falls", "learning/length_bias",
]  # fmt: skip


class TrainerSection(Section):
    """[trainer]: the loop around the learner."""

    loop: DottedPath | None = None
    """a trainer of yours as package.module:function, as those in examples/; default: the reference
    trainer
    """
    flow: Literal["disaggregated", "colocated"] = "disaggregated"
    """disaggregated: workers generate while the trainer trains. colocated: workers are paused from
    the take of a batch until the new weights are published ([policy] pause_mode abort or drain),
    and may sleep ([worker] sleep_when_paused)
    """
    advantages: Annotated[str, AfterValidator(_check_advantages)] = "grpo"
    """how a reward becomes an advantage: compared with the other rollouts of its prompt (grpo,
    dr_grpo, rloo, opo, pass_at_k; turns: also turn by turn, by their token_rewards; otb: token by
    token, which costs a forward pass; gdpo: each part of the reward by itself), with the batch
    (reinforce_pp, reinforce_pp_baseline), with the values of a critic (gae, see [critic]), or by a
    function of yours as package.module:function: see docs/pages/loss.md. none: rewards are not read
    and may be missing, for [learner.distillation] alone
    """
    reward_weights: dict[str, Annotated[float, Field(ge=-1e6, le=1e6)]] = Field(
        default_factory=dict
    )
    """for advantages = gdpo: the parts of the reward that count, and their weights, for example {
    correct = 1.0, format = 0.2 }; the judge returns them beside "score"
    """
    overlong_buffer_tokens: Count | None = Field(None, ge=1)
    """scores fall linearly, by up to 1, over this many tokens before a response's max_tokens
    (DAPO); default: no penalty
    """
    max_sequence_tokens: Count | None = Field(None, ge=1)
    """rollouts with more tokens than this, prompt included, are not trained
    (consumer/grpo/learner/batch_filter.py); default: no limit
    """
    mask_truncated: bool = False
    """rollouts that reached their max_tokens are not trained; their scores still count for the
    others
    """
    checkpoint_every_steps: Count = Field(5, ge=1)
    """train steps between two checkpoints; a restart repeats at most this many"""
    keep_checkpoints: int = Field(2, ge=1, le=1_000_000)
    """number of checkpoints kept; batches since the oldest one can be delivered again"""
    keep_weights: int = Field(3, ge=2, le=1_000_000)
    """published versions kept on disk, for workers that still load an older one"""
    producer_timeout_s: float | None = Field(120.0, gt=0, le=YEAR_S)
    """time for which the trainer waits for a batch without a live producer before it ends with an
    error
    """
    device: str = Field("auto", pattern=r"^(auto|cpu|cuda(:\d{1,3})?)$")
    """device of the model: auto (CUDA where there is some), cpu, cuda or cuda:N"""
    writers: Annotated[tuple[WriterName, ...], FromList] = ()
    """destinations of config, metrics, evaluations and samples beside the run's folder: tensorboard
    (`pip install '.[tensorboard]'`), wandb (`pip install '.[wandb]'`)
    """
    silence: Annotated[tuple[LearningFinding, ...], FromList] = ()
    """findings about learning that are neither logged nor shown, from the next step on, for example
    ["learning/length_bias"]: see docs/pages/reward_does_not_rise.md
    """

    def problems(self) -> Iterator[str]:
        if bool(self.reward_weights) != (self.advantages == "gdpo"):
            yield (
                "reward_weights names the parts of the reward for advantages = gdpo, which needs "
                "them; no other estimator reads them"
            )
        if self.overlong_buffer_tokens and self.advantages in ("gdpo", "none", "pass_at_k"):
            yield (
                "overlong_buffer_tokens lowers the score, and advantages = "
                f"{self.advantages} reads no part of a score"
            )
        if self.reward_weights and not any(self.reward_weights.values()):
            yield "reward_weights are all 0: every advantage would be 0"

    @property
    def is_gae(self) -> bool:
        """Return whether there is a critic."""
        return self.advantages == "gae"


MOST_PROBLEMS = 1024
"""Problems of one evaluation at most: it is one batch, and take_batch.lua takes no larger one."""


class EvaluationSection(Section):
    """[evaluation]: when the weights are evaluated on every task with `eval_of`.

    The first and the last weights always are.
    """

    every_steps: Count | None = Field(None, ge=1)
    """interval in train steps, a multiple of [policy] sync_weights_interval; default: only the
    first and the last weights are evaluated
    """
    flow: Literal["foreground", "exclusive", "background"] = "foreground"
    """foreground: the trainer waits for the result, and workers prefer evaluation jobs to training
    jobs. exclusive: training jobs are paused meanwhile, after new weights are published and before
    the run continues ([policy] pause_mode abort or drain). background: the trainer continues
    """
    groups: int | None = Field(None, ge=1, le=MOST_PROBLEMS)
    """problems per evaluation; default: all held-out problems. Only then are they the same each
    time
    """


class SamplesSection(Section):
    """[samples]: the texts of each train step that are kept in `samples/` of the run's folder.

    They remain after the payloads are freed: `rolloutmq batch`, `rolloutmq show` and the browser
    view read them.
    """

    groups_per_step: Count = Field(4, ge=0, le=1024)
    """groups of each step whose texts are kept: the one with the best mean score, the one with the
    worst, the one with the most truncated responses, and others at random, by run.seed and the step
    (1: the best); 0: none
    """
    tokens_per_rollout: Count = Field(1024, ge=0)
    """first tokens of each rollout whose ids, log-probabilities and entropy are kept, too; 0: none
    """
    report_every_steps: Count = Field(10, ge=1)
    """interval in train steps at which they are also passed to [trainer] writers, beginning with
    step 1
    """
    max_size: Annotated[Bytes, Field(ge=2**20, le=1 << 50)] = 2 * 2**30
    """bytes, as a number or text like "8GiB"; above it, the oldest files of `samples/` are deleted
    """


class WandbSection(Section):
    """[wandb]: the run at Weights & Biases; [trainer] writers enables it."""

    project: str = Field("rolloutmq", min_length=1, max_length=128)
    """name of the project"""
    name: str | None = Field(None, min_length=1, max_length=128)
    """name that is shown; default: the name of the run"""
    entity: str | None = Field(None, min_length=1, max_length=128)
    """user or team; default: that of the API key"""
    mode: Literal["online", "offline", "disabled"] | None = None
    """offline: write files only, for `wandb sync`; default: the environment variable WANDB_MODE,
    else online
    """


class TrainingConfig(Protocol):
    """The sections that a trainer reads, and what others say about the run."""

    @property
    def run(self) -> RunSection: ...
    @property
    def policy(self) -> PolicySection: ...
    @property
    def weights(self) -> WeightsSection: ...
    @property
    def trainer(self) -> TrainerSection: ...
    @property
    def learner(self) -> LearnerConfig: ...
    @property
    def critic(self) -> CriticConfig: ...
    @property
    def evaluation(self) -> EvaluationSection: ...
    @property
    def samples(self) -> SamplesSection: ...
    @property
    def wandb(self) -> WandbSection: ...
    @property
    def tasks(self) -> Collection[str]: ...
    @property
    def model_folder(self) -> Path: ...
    @property
    def train_roles(self) -> Mapping[str, Collection[str]]:
        """Return the roles that tasks train, of those that name them."""
        ...

    @property
    def column_weights(self) -> Mapping[str, Mapping[str, float]]:
        """Return the weights of columns in the loss, by task."""
        ...

    @property
    def worker_gpus(self) -> int:
        """Return the number of GPUs that sample."""
        ...

    def evaluation_size(self, task: str) -> int:
        """Return the number of problems of one evaluation. Raises ConfigError."""
        ...

    def leaves_out_failed(self, task: str) -> bool:
        """Return whether problems that failed are no part of an evaluation's means."""
        ...

    def public(self) -> dict[str, Any]:
        """Return all values as JSON, without secrets."""
        ...
