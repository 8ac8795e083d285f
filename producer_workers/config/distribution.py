"""Distributions of lengths and latencies, for the simulated engine and the simulator."""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

MOST = 1e9
"""Largest value of a distribution: tokens, or seconds."""


class _Shape(BaseModel):
    """A length or a latency of the simulated engine: no draw is negative."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class Fixed(_Shape):
    """Always `value`."""

    shape: Literal["fixed"] = "fixed"
    """the kind of distribution"""
    value: float = Field(ge=0, le=MOST)
    """every draw"""

    def draw(self, rng: np.random.Generator) -> float:
        return self.value


class LogNormal(_Shape):
    """`median * exp(sigma * normal)`, the long tail of real response lengths."""

    shape: Literal["lognormal"] = "lognormal"
    """the kind of distribution"""
    median: float = Field(gt=0, le=MOST)
    """half of the draws are smaller"""
    sigma: float = Field(0.5, ge=0, le=10)
    """standard deviation of the logarithm"""

    def draw(self, rng: np.random.Generator) -> float:
        return float(self.median * np.exp(self.sigma * rng.standard_normal()))


class Bimodal(_Shape):
    """`long` with probability `long_share`, else `short`: a few members delay their group."""

    shape: Literal["bimodal"] = "bimodal"
    """the kind of distribution"""
    short: float = Field(ge=0, le=MOST)
    """the common draw"""
    long: float = Field(ge=0, le=MOST)
    """the rare draw"""
    long_share: float = Field(0.1, ge=0, le=1)
    """probability of the rare draw"""

    def draw(self, rng: np.random.Generator) -> float:
        return self.long if rng.random() < self.long_share else self.short


Distribution = Annotated[Fixed | LogNormal | Bimodal, Field(discriminator="shape")]
