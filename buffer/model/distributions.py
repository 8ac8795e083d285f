"""Random lengths and latencies for the simulated engine.

Invariant: a draw depends on nothing but the generator it is given, and is never negative.
"""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field


class Fixed(BaseModel):
    """Always `value`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    shape: Literal["fixed"] = "fixed"
    value: float = Field(ge=0)

    def draw(self, rng: np.random.Generator) -> float:
        return self.value


class LogNormal(BaseModel):
    """`median * exp(sigma * normal)`: the long tail of real response lengths."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    shape: Literal["lognormal"] = "lognormal"
    median: float = Field(gt=0)
    sigma: float = Field(0.5, ge=0)

    def draw(self, rng: np.random.Generator) -> float:
        return float(self.median * np.exp(self.sigma * rng.standard_normal()))


class Bimodal(BaseModel):
    """`long` with probability `long_share`, else `short`: the few stragglers that a group waits
    for.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    shape: Literal["bimodal"] = "bimodal"
    short: float = Field(ge=0)
    long: float = Field(ge=0)
    long_share: float = Field(0.1, ge=0, le=1)

    def draw(self, rng: np.random.Generator) -> float:
        return self.long if rng.random() < self.long_share else self.short


Distribution = Annotated[Fixed | LogNormal | Bimodal, Field(discriminator="shape")]
