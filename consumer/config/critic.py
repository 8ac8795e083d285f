"""[critic]: the value model of [trainer] advantages = gae."""

from __future__ import annotations

from pydantic import Field

from buffer.config.section import Count, Section


class CriticConfig(Section):
    """[critic]: the value model; used only with [trainer] advantages = gae.

    Its kind of optimizer, precision and gradient checkpointing are those of [learner].
    """

    learning_rate: float = Field(1e-5, gt=0, le=10)
    """step size of AdamW"""
    warmup_steps: Count = Field(0, ge=0)
    """the learning rate rises linearly from 0 over this many train steps"""
    clip: float | None = Field(0.2, gt=0, le=1e6)
    """largest change of a value in one step"""
    gamma: float = Field(1.0, ge=0, le=1)
    """discount of a reward per token"""
    lam: float = Field(1.0, ge=0, le=1)
    """GAE's lambda: 1 relies on rewards alone, 0 on the critic's values"""
    max_grad_norm: float = Field(1.0, gt=0, le=1e9)
    """norm to which larger gradients are scaled down"""
