"""[learner] of the config: optimizer, schedule, batch layout and loss. Needs no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from buffer.config.loader import Section

Aggregation = Literal["token_mean", "sequence_mean", "fixed_length"]
Objective = Literal["ppo", "gspo", "cispo"]


class LossConfig(Section):
    """[learner.loss]: the clipped policy-gradient loss."""

    objective: Objective = "ppo"
    """ppo (GRPO and DAPO clip so), gspo (one ratio per sample), cispo (clips the weight, never the gradient)"""
    clip_low: float = Field(0.2, ge=0, le=1)
    """ratios below 1 - clip_low get no gradient where the advantage is negative"""
    clip_high: float = Field(0.28, ge=0)
    """ratios above 1 + clip_high get no gradient where the advantage is positive"""
    dual_clip: float | None = Field(None, gt=1)
    """ppo: upper bound of what a negative advantage is multiplied by, for example 3.0; None = unbounded"""
    aggregation: Aggregation = "token_mean"
    """token_mean (DAPO), sequence_mean (GRPO), fixed_length (Dr. GRPO: divides by `max_tokens`)"""
    max_tokens: int | None = Field(None, ge=1)
    """the divisor of fixed_length: the longest answer that may be sampled"""
    importance_cap: float | None = Field(2.0, gt=0)
    """upper bound of the weight old policy / rollout policy; None = no such weight"""
    importance_level: Literal["token", "sequence", "geometric"] = "token"
    """what has such a weight: each token, a sample (the product over its tokens), a sample by its geometric mean"""
    importance_mode: Literal["truncate", "mask"] = "truncate"
    """what becomes of a weight over the bound: it is cut to it, or what it belongs to is dropped"""
    importance_floor: float = Field(0.0, ge=0)
    """mask: weights below are dropped too"""
    importance_veto: float | None = Field(None, gt=0, lt=1)
    """a sample with a token whose weight is below this is dropped whole, for example 1e-4; None = none is"""
    kl_coef: float = Field(0.0, ge=0)
    """weight of the KL term to the initial model; 0 = none, and no reference model is held"""
    kl_kind: Literal["k1", "abs", "k2", "k3"] = "k3"
    """how that KL is estimated from the sampled token; k3 is unbiased and never negative"""
    entropy_coef: float = Field(0.0, ge=0)
    """weight of an entropy bonus"""

    @model_validator(mode="after")
    def _has_divisor(self) -> LossConfig:
        if self.aggregation == "fixed_length" and self.max_tokens is None:
            raise ValueError("aggregation fixed_length needs max_tokens")
        return self

    @model_validator(mode="after")
    def _fits_the_objective(self) -> LossConfig:
        if self.dual_clip is not None and self.objective != "ppo":
            raise ValueError(f"dual_clip belongs to objective ppo, not to {self.objective}")
        if self.importance_floor > 0 and self.importance_mode != "mask":
            raise ValueError("importance_floor needs importance_mode = mask: truncation has no lower bound")
        return self


class LoraConfig(Section):
    """[learner.lora]: a LoRA adapter is trained, saved and published, and the model stays as it is."""

    rank: int = Field(16, ge=1, le=256)
    """of each pair of matrices; at most [engine] max_lora_rank"""
    alpha: float = Field(32.0, gt=0)
    """the product of a pair is added alpha / rank times"""
    target_modules: tuple[str, ...] = Field(
        ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"), min_length=1
    )
    """the linear layers that get one, by the last part of their name"""


class LearnerConfig(Section):
    """[learner]: optimizer, schedule and batch layout."""

    learning_rate: float = Field(1e-6, gt=0)
    betas: tuple[float, float] = (0.9, 0.98)
    weight_decay: float = Field(0.0, ge=0)
    max_grad_norm: float = Field(1.0, gt=0)
    warmup_steps: int = Field(0, ge=0)
    """the rate rises linearly from 0 over this many optimizer steps"""
    decay_steps: int | None = Field(None, ge=1)
    """the rate falls to `final_rate` of itself over this many optimizer steps; unset: it stays"""
    schedule: Literal["linear", "cosine"] = "linear"
    """how it falls"""
    final_rate: float = Field(0.1, ge=0, le=1)
    updates_per_batch: int = Field(1, ge=1)
    """optimizer steps per batch: its groups are cut, in order, into this many parts"""
    token_budget: int = Field(8192, ge=1)
    """token slots of one forward pass"""
    temperature: float = Field(1.0, gt=0)
    """sampling temperature of the rollouts: their logprobs are those of logits divided by it. The tasks' must be it"""
    old_policy: Literal["rollout", "current"] = "rollout"
    """what the ratio is clipped against: the rollout's own logprobs, or the weights before this batch"""
    bf16: bool = False
    """forward pass, and published weights, in bfloat16; parameters and optimizer stay float32"""
    replay_routing: bool = False
    """a mixture of experts is trained with the experts that the engine chose ([engine] routed_experts): R3,
    arXiv:2510.11370. The reference of a KL term chooses for itself"""
    gradient_checkpointing: bool = False
    """compute activations again in the backward pass, in place of keeping them: less memory, a third more time"""
    lora: LoraConfig | None = None
    """train a LoRA adapter in place of the weights (`pip install 'rolloutmq[lora]'`); unset: the weights"""
    loss: LossConfig = LossConfig()
