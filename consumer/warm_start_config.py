"""[warm_start] of the config: supervised training before GRPO. Imports no torch."""

from __future__ import annotations

from pydantic import Field

from buffer.config.loader import Section


class WarmStartConfig(Section):
    """[warm_start]: the supervised phase.

    Usage:

        WarmStartConfig(max_steps=500, stop_accuracy=0.3)
    """

    max_steps: int = Field(2000, ge=1)
    """stop after this many steps, whatever the accuracy"""
    stop_accuracy: float = Field(0.48, ge=0, le=1)
    """stop when the greedy accuracy on the development problems reaches this"""
    check_every_steps: int = Field(25, ge=1)
    development_problems: int = Field(300, ge=1)
    """number of held-out problems, from the end of the file; never trained on"""
    batch_size: int = Field(32, ge=1)
    """problems per step"""
    learning_rate: float = Field(3e-3, gt=0)
    warmup_steps: int = Field(30, ge=1)
    seed: int = Field(0, ge=0, lt=2**32)
