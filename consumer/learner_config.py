"""[learner] of the config: optimizer, schedule, batch layout and loss. Needs no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from buffer.config import Section

Aggregation = Literal["token_mean", "sequence_mean", "fixed_length"]


class LossConfig(Section):
    """[learner.loss]: the clipped policy-gradient loss."""

    clip_low: float = Field(0.2, ge=0, le=1)
    """ratios below 1 - clip_low get no gradient where the advantage is negative"""
    clip_high: float = Field(0.28, ge=0)
    """ratios above 1 + clip_high get no gradient where the advantage is positive"""
    aggregation: Aggregation = "token_mean"
    """token_mean (DAPO), sequence_mean (GRPO), fixed_length (Dr. GRPO: divides by `max_tokens`)"""
    max_tokens: int | None = Field(None, ge=1)
    """the divisor of fixed_length: the longest answer that may be sampled"""
    importance_cap: float | None = Field(2.0, gt=0)
    """upper bound of the weight old policy / rollout policy; None = no such weight"""
    kl_coef: float = Field(0.0, ge=0)
    """weight of the KL term to the initial model; 0 = none, and no reference model is held"""
    entropy_coef: float = Field(0.0, ge=0)
    """weight of an entropy bonus"""

    @model_validator(mode="after")
    def _has_divisor(self) -> LossConfig:
        if self.aggregation == "fixed_length" and self.max_tokens is None:
            raise ValueError("aggregation fixed_length needs max_tokens")
        return self


class LearnerConfig(Section):
    """[learner]: optimizer, schedule and batch layout."""

    learning_rate: float = Field(1e-6, gt=0)
    betas: tuple[float, float] = (0.9, 0.98)
    weight_decay: float = Field(0.0, ge=0)
    max_grad_norm: float = Field(1.0, gt=0)
    warmup_steps: int = Field(0, ge=0)
    """the rate rises linearly from 0 over this many optimizer steps"""
    decay_steps: int | None = Field(None, ge=1)
    """the rate falls linearly to `final_rate` of itself over this many optimizer steps; unset: it stays"""
    final_rate: float = Field(0.1, ge=0, le=1)
    updates_per_batch: int = Field(1, ge=1)
    """optimizer steps per batch: its groups are cut, in order, into this many parts"""
    token_budget: int = Field(8192, ge=1)
    """token slots of one forward pass"""
    temperature: float = Field(1.0, gt=0)
    """sampling temperature of the rollouts: their logprobs are those of logits divided by it"""
    old_policy: Literal["rollout", "current"] = "rollout"
    """what the ratio is clipped against: the rollout's own logprobs, or the weights before this batch"""
    bf16: bool = False
    """forward pass, and published weights, in bfloat16; parameters and optimizer stay float32"""
    loss: LossConfig = LossConfig()
