"""[learner]: the optimization of the policy, and its loss."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, Field

from buffer.config.section import Count, FromList, Section
from buffer.imports import is_dotted_path

Outside = Literal["bucket", "renormalise"]


class DistillationConfig(Section):
    """[learner.distillation]: train the policy on its own tokens towards the teachers of its tasks.

    Teachers are added up by their weight ([tasks.<name>.teachers.<teacher>]). A token without the
    values of a teacher is trained without them. See docs/pages/distillation.md.
    """

    coef: float = Field(1.0, ge=0, le=1e6)
    """what log(teacher / policy) of the sampled token is multiplied by before it is added to the
    token's advantage; 0: it is not added
    """
    clip: float = Field(10.0, gt=0, le=1e6)
    """bound of log(teacher / policy) in nats, and of the loss over top tokens"""
    top_k_loss: Literal["none", "forward", "reverse"] = "none"
    """a loss beside the policy loss, over the top_k most probable tokens of each teacher: forward
    is KL(teacher, policy), reverse is KL(policy, teacher)
    """
    top_k_coef: float = Field(1.0, gt=0, le=1e6)
    """weight of that loss"""
    outside: Outside = "bucket"
    """how it counts all other tokens: as one more token with the rest of the probability (bucket),
    or not at all, so that the policy is not kept from them (renormalise)
    """

    def problems(self) -> Iterator[str]:
        if self.top_k_loss == "none":
            if self.coef == 0:
                yield "coef = 0 without top_k_loss: teachers would have no effect"
            if self.top_k_coef != 1.0 or self.outside != "bucket":
                yield "top_k_coef and outside cannot act without top_k_loss"


Aggregation = Literal["token_mean", "sequence_mean", "fixed_length"]
KlKind = Literal["abs", "k2", "k3"]
Attention = Literal[
    "auto", "flash_attention_3", "flash_attention_2", "torch_varlen", "sdpa", "flex_attention",
    "eager",
]  # fmt: skip
OptimizerKind = Literal["adamw", "adamw_8bit"]
Decay = Annotated[float, Field(ge=0, lt=1)]


class ObjectiveDefaults(NamedTuple):
    """What a paper uses, where the config says nothing."""

    clip_low: float
    clip_high: float
    aggregation: Aggregation


OBJECTIVES = {
    "cispo": ObjectiveDefaults(1.0, 0.28, "token_mean"),
    "dppo": ObjectiveDefaults(0.15, 0.15, "token_mean"),
    "gspo": ObjectiveDefaults(3e-4, 4e-4, "sequence_mean"),
    "ppo": ObjectiveDefaults(0.2, 0.28, "token_mean"),
    "sapo": ObjectiveDefaults(0.2, 0.28, "sequence_mean"),
}
"""Our objectives, with the defaults of their papers (`consumer/grpo/objectives.py`)."""


def _defaults(data: Mapping[str, Any]) -> ObjectiveDefaults:
    """Return the defaults of [learner.loss], as far as it is read; those of a user's are ppo's."""
    return OBJECTIVES.get(data.get("objective", "ppo"), OBJECTIVES["ppo"])


def _check_objective(text: str) -> str:
    if text not in OBJECTIVES and not is_dotted_path(text):
        raise ValueError(f"it is not one of {', '.join(OBJECTIVES)}, nor package.module:function")
    return text


Objective = Annotated[str, AfterValidator(_check_objective)]
"""The name of a function in `consumer/grpo/objectives.py`, or a function of the user."""

IMPORTANCE_KEYS = ("importance_level", "importance_mode", "importance_floor", "importance_veto")
"""Keys of [learner.loss] that say how the importance weight is bounded, besides its cap."""


OWN_BOUND = ("cispo", "sapo")
"""Objectives whose gradient is bounded without `importance_cap`."""


def _changed(section: Section, *keys: str) -> list[str]:
    """Return which of these keys have another value than their default."""
    return [key for key in keys if getattr(section, key) != section.default_of(key)]


class LossConfig(Section):
    """[learner.loss]: the clipped policy-gradient loss."""

    objective: Objective = "ppo"
    """ppo (also for GRPO and DAPO), gspo (one ratio per sample), cispo (clips the weight, not the
    gradient), dppo (bounds the change of a probability, not its ratio), sapo (a soft bound), or a
    function of yours as package.module:function: see docs/pages/loss.md
    """
    clip_low: float = Field(default_factory=lambda data: _defaults(data).clip_low, ge=0, le=1)
    """ratios of present to old policy below 1 - clip_low get no gradient where the advantage is
    negative; dppo: probabilities that fell by more than it; cispo: smaller weights are raised to
    it. Default: that of the objective's paper, 0.2 for ppo, 0.0003 for gspo, 0.15 for dppo, 1 for
    cispo (no bound)
    """
    clip_high: float = Field(default_factory=lambda data: _defaults(data).clip_high, ge=0, le=1e6)
    """ratios above 1 + clip_high get no gradient where the advantage is positive; dppo:
    probabilities that rose by more than it; cispo: larger weights are reduced to it. Default: that
    of the objective's paper, 0.28 for ppo, 0.0004 for gspo, 0.15 for dppo; 0.28 for cispo
    """
    dual_clip: float | None = Field(None, gt=1, le=1e6)
    """for ppo: ratios above it get no gradient where the advantage is negative, for example 3.0;
    default: no limit
    """
    off_policy_mask: float | None = Field(None, gt=0, le=1e6)
    """samples with a negative advantage get no policy gradient where the mean of log(sampling /
    present policy) over their tokens is above it (DeepSeek-V3.2); default: all get one
    """
    aggregation: Aggregation = Field(default_factory=lambda data: _defaults(data).aggregation)
    """how the losses of tokens are added up: token_mean (DAPO), sequence_mean (GRPO), fixed_length
    (Dr. GRPO: divides by max_tokens). Default: token_mean; sequence_mean for gspo and sapo
    """
    max_tokens: Count | None = Field(None, ge=1)
    """divisor of fixed_length, the longest response that may be sampled; default: none"""
    importance_cap: float | None = Field(2.0, gt=0, le=1e6)
    """upper bound of the importance weight old policy / rollout policy, by which the loss of each
    token is multiplied; without it, nothing is corrected or dropped. With [learner] old_policy =
    rollout, the bound of the ratio in the gradient of ppo, gspo and dppo
    """
    importance_level: Literal["token", "sequence", "geometric"] = "token"
    """unit of the importance weight: each token, a sample (product over its tokens), or a sample by
    the geometric mean of its tokens
    """
    importance_mode: Literal["truncate", "mask"] = "truncate"
    """a weight above the bound is reduced to it (truncate), or its token or sample is dropped
    (mask)
    """
    importance_floor: float = Field(0.0, ge=0, le=1e6)
    """for importance_mode mask: tokens or samples with a smaller weight are dropped, too"""
    importance_veto: float | None = Field(None, gt=0, lt=1)
    """samples that have a token with a smaller weight are dropped, for example 1e-4; default: none
    are dropped
    """
    kl_coef: float = Field(0.0, ge=0, le=1e6)
    """weight of the KL term to the initial model; 0: no such term, and no reference model is
    loaded. Tokens of older weights count with their importance weight
    """
    kl_reference: str | None = None
    """a teacher whose logprobs are the reference of that KL, so that the trainer loads no second
    model; default: the initial model
    """
    kl_kind: KlKind = "k3"
    """estimator of that KL from the sampled token: k3 (its value is unbiased), k2 (its gradient
    is), abs. There is no k1, the plain difference: the mean of its gradient is 0
    """
    entropy_coef: float = Field(0.0, ge=0, le=1e6)
    """weight of an entropy bonus"""

    @property
    def has_own_reference(self) -> bool:
        """Return whether the trainer holds the reference of the KL as a second model."""
        return self.kl_coef > 0 and self.kl_reference is None

    def problems(self) -> Iterator[str]:
        if self.kl_reference and not self.kl_coef:
            yield "kl_reference needs kl_coef, the weight of the KL to it"
        if self.aggregation == "fixed_length" and self.max_tokens is None:
            yield "aggregation fixed_length needs max_tokens, its divisor"
        if self.dual_clip is not None and self.objective != "ppo":
            yield f"dual_clip belongs to objective ppo, not to {self.objective}"
        if self.objective == "sapo":
            for key in _changed(self, "clip_low", "clip_high"):
                yield f"{key} cannot act with objective = sapo, which has no hard bound"
        if self.max_tokens is not None and self.aggregation != "fixed_length":
            yield "max_tokens is read by aggregation = fixed_length only, and limits no response"
        if not self.kl_coef and _changed(self, "kl_kind"):
            yield "kl_kind needs kl_coef, the weight of the KL that it estimates"
        yield from self._importance_problems()

    def _importance_problems(self) -> Iterator[str]:
        floor, cap = self.importance_floor, self.importance_cap
        if floor > 0 and self.importance_mode != "mask":
            yield "importance_floor needs importance_mode = mask: truncation has no lower bound"
        if cap is None:
            if others := _changed(self, *IMPORTANCE_KEYS):
                yield f"{' and '.join(others)} cannot act without importance_cap"
        elif self.importance_mode == "mask" and not (floor <= 1 <= cap and floor < cap):
            yield (
                f"importance_mode = mask drops tokens with a weight below importance_floor = "
                f"{floor:g} or above importance_cap = {cap:g}, and the weight of what the present "
                "weights sampled is 1: all of it would be dropped; the two must enclose 1"
            )


class LoraConfig(Section):
    """[learner.lora]: train and publish a LoRA adapter; the model's own weights are frozen."""

    rank: int = Field(16, ge=1, le=256)
    """rank of each pair of matrices; at most [engine] max_lora_rank"""
    alpha: float = Field(32.0, gt=0, le=1e6)
    """the product of a pair is multiplied by alpha / rank"""
    target_modules: Annotated[tuple[str, ...], FromList] = Field(
        ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"), min_length=1
    )
    """the linear layers that get an adapter, by the last part of their name"""


class ShardingConfig(Section):
    """[learner.sharding]: how several ranks share the models (FSDP2); one rank ignores it."""

    reshard_after_forward: bool = True
    """free the gathered weights of a layer after its forward pass, and gather them again for the
    backward pass; false: keep the whole model in memory between the two, with less traffic
    """
    reduce_each_micro_batch: bool = False
    """reduce gradients in every micro-batch; false: once per optimizer step, with less traffic, but
    until then every rank holds the gradient of the whole model: 4 bytes per parameter
    """
    cpu_offload: bool = False
    """keep weights, gradients and optimizer state in host memory, and copy a layer to the GPU when
    it is computed
    """


class LearnerConfig(Section):
    """[learner]: optimizer, schedule and batch layout."""

    optimizer: OptimizerKind = "adamw"
    """adamw: float32 moments. adamw_8bit: moments in 8 bits, 6 bytes per parameter less (`pip
    install '.[bitsandbytes]'`), on one rank only. A run keeps its optimizer
    """
    learning_rate: float = Field(1e-6, gt=0, le=10)
    """step size of AdamW"""
    betas: Annotated[tuple[Decay, Decay], FromList] = (0.9, 0.98)
    """decay rates of AdamW's two moments"""
    weight_decay: float = Field(0.0, ge=0, le=1e3)
    """weight decay of AdamW; norms and biases have none"""
    max_grad_norm: float = Field(1.0, gt=0, le=1e9)
    """norm to which larger gradients are scaled down"""
    max_skipped_updates: int = Field(5, ge=1, le=1_000_000)
    """the trainer stops after this many optimizer steps in a row whose gradient is not finite; each
    such step is skipped
    """
    warmup_steps: Count = Field(0, ge=0)
    """the learning rate rises linearly from 0 over this many train steps"""
    decay_steps: Count | None = Field(None, ge=1)
    """after the warm-up, the learning rate decays to final_rate, which it reaches at this train
    step; default: no decay
    """
    schedule: Literal["linear", "cosine"] = "linear"
    """shape of the decay"""
    final_rate: float = Field(0.1, ge=0, le=1)
    """learning rate after the decay, as a share of learning_rate"""
    updates_per_batch: int = Field(1, ge=1, le=1024)
    """optimizer steps per batch: its groups are divided, in order, into this many parts"""
    token_budget: Count = Field(8192, ge=1)
    """largest number of tokens in one forward pass"""
    temperature: float = Field(1.0, gt=0, le=100)
    """sampling temperature of the rollouts: logits are divided by it. It must equal the temperature
    of all tasks
    """
    allow_truncated_sampling: bool = False
    """train although the engine samples from another distribution than the trainer's, so that the
    ratio of the two is wrong even for equal weights: with penalties, or, on an engine that does not
    record what top_p, top_k, min_p, min_tokens and structured leave, with these. true: no engine
    records it. See docs/pages/loss.md
    """
    old_policy: Literal["auto", "current", "rollout"] = "auto"
    """policy that the ratio is clipped against. rollout: the policy that sampled, by its recorded
    logprobs: the bounds of [learner.loss] act on data that has become too old. current: the
    trainer's weights before this batch; the importance weight corrects for the policy that sampled
    (decoupled PPO). It costs a forward pass per batch where updates_per_batch is above 1. auto:
    rollout with one update per batch and an objective of ours, else current. See docs/pages/loss.md
    """
    bf16: bool | Literal["auto"] = "auto"
    """forward pass and published weights in bfloat16; parameters and optimizer stay float32. auto:
    true on a CUDA device that computes in it, false on a CPU
    """
    fp32_logits: bool | Literal["auto"] = "auto"
    """with bf16, keep the logits in float32, which costs nothing on a GPU; else they are rounded to
    bfloat16: by 0.02 nats of a logprob in the mean, 0.08 at most. auto: true on a CUDA device,
    false on a CPU
    """
    attn_implementation: Attention = "auto"
    """attention of the model. The flash_attention kinds (packages of their own) and torch_varlen
    (in torch) attend within each sample of a packed row without a mask, need CUDA and bf16, and are
    what auto prefers; sdpa makes a mask where samples share rows
    """
    replay_routing: bool = False
    """train a mixture of experts with the experts that the engine chose ([engine] routed_experts):
    R3, arXiv:2510.11370. The reference model of a KL term chooses its own
    """
    gradient_checkpointing: bool = False
    """recompute activations in the backward pass instead of storing them: less memory, a third more
    time
    """
    compile: bool = False
    """compile the layers of the model with torch.compile, at the first steps: they take minutes
    longer. It needs a C++ compiler on a CPU, a C compiler for CUDA; no mixture of experts
    """
    lora: LoraConfig | None = None
    """train a LoRA adapter (`pip install '.[lora]'`); default: train the model's weights"""
    sharding: ShardingConfig = ShardingConfig()
    """how several ranks share the models"""
    loss: LossConfig = LossConfig()
    """the loss"""
    distillation: DistillationConfig | None = None
    """train towards teachers, too; default: their log-probabilities are not read"""

    def problems(self) -> Iterator[str]:
        if self.decay_steps is None:
            for key in _changed(self, "schedule", "final_rate"):
                yield f"{key} needs decay_steps: without it, the learning rate does not decay"
        elif self.decay_steps <= self.warmup_steps:
            yield (
                f"decay_steps = {self.decay_steps} is the train step at which the decay ends: "
                f"it must be larger than warmup_steps = {self.warmup_steps}"
            )
        yield from self._idle_bounds()

    @property
    def is_against_rollout(self) -> bool:
        """Return whether the ratio is to the policy that sampled; resolves `auto`."""
        if self.old_policy == "auto":
            return self.updates_per_batch == 1 and not is_dotted_path(self.loss.objective)
        return self.old_policy == "rollout"

    def _idle_bounds(self) -> Iterator[str]:
        """Yield each key of [learner.loss] that is set and would bound nothing."""
        loss = self.loss
        has_idle_ratio = self.updates_per_batch == 1 and not is_dotted_path(loss.objective)
        idle = _changed(loss, "objective", "clip_low", "clip_high", "dual_clip")
        if self.is_against_rollout:
            if loss.importance_level != "token" and loss.importance_mode == "truncate":
                yield (
                    f"importance_level = {loss.importance_level} of [learner.loss] cannot act: "
                    "with one update per batch or old_policy = rollout, the ratio is the weight; "
                    "set importance_mode = mask, or old_policy = current"
                )
            has_own_bound = loss.objective in OWN_BOUND or is_dotted_path(loss.objective)
            is_read = loss.importance_mode == "mask" or loss.kl_coef > 0
            if has_own_bound and not is_read and _changed(loss, "importance_cap"):
                yield (
                    f"importance_cap of [learner.loss] cannot act with objective = "
                    f"{loss.objective}, which bounds the ratio itself"
                )
        elif has_idle_ratio and idle:
            yield (
                f"{' and '.join(idle)} of [learner.loss] cannot act with old_policy = current "
                "and updates_per_batch = 1: the ratio is always 1; remove old_policy"
            )
