"""[critic] of the config: the value model of `advantages = "gae"`. Imports no torch."""

from __future__ import annotations

from pydantic import Field

from buffer.config.loader import Section


class CriticConfig(Section):
    """[critic]: the value model; used only with [trainer] advantages = gae.

    Usage:

        CriticConfig(learning_rate=1e-5, lam=0.95)
    """

    learning_rate: float = Field(1e-5, gt=0)
    clip: float | None = Field(0.2, gt=0)
    """largest change of a value in one step; None: unbounded"""
    gamma: float = Field(1.0, ge=0, le=1)
    """discount of a reward per token"""
    lam: float = Field(1.0, ge=0, le=1)
    """GAE's lambda: 1 relies on rewards alone, 0 on the critic's values"""
    max_grad_norm: float = Field(1.0, gt=0)
