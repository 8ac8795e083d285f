"""[critic] of the config: the value model of `advantages = "gae"`. Needs no torch."""

from __future__ import annotations

from pydantic import Field

from buffer.config.loader import Section


class CriticConfig(Section):
    """[critic]: the value model; only there with [trainer] advantages = gae."""

    learning_rate: float = Field(1e-5, gt=0)
    clip: float | None = Field(0.2, gt=0)
    """how far a value may move in one step; None = as far as it likes"""
    gamma: float = Field(1.0, ge=0, le=1)
    """what a reward is worth one token later"""
    lam: float = Field(1.0, ge=0, le=1)
    """GAE's lambda: 1 trusts rewards alone, 0 the critic alone"""
    max_grad_norm: float = Field(1.0, gt=0)
