"""[cost]: what a run costs, from the account of tokens and the time of its GPUs."""

from __future__ import annotations

from pydantic import Field

from buffer.config.attached import AttachedSection
from buffer.config.section import Count


class CostSection(AttachedSection):
    """[cost]: prices, in a currency of your own; without one, that part costs nothing."""

    currency: str = Field("USD", pattern=r"^[^\s/]{1,8}$")
    """what prices are in; a label that stands where costs are shown"""
    worker_gpu_hour: float = Field(0.0, ge=0, le=1e9)
    """price of an hour of one GPU that samples"""
    worker_gpus: Count | None = Field(None, ge=1)
    """GPUs of one worker; default: as `launch` places workers, at least 1"""
    trainer_gpu_hour: float = Field(0.0, ge=0, le=1e9)
    """price of an hour of one GPU of the trainer"""
    judge_gpu_hour: float = Field(0.0, ge=0, le=1e9)
    """price of an hour of one GPU for judges"""
    judge_gpus: Count = Field(1, ge=1)
    """GPUs for judges, in all, if `judge_gpu_hour` is set; paid from the first train step on"""
    million_sampled_tokens: float = Field(0.0, ge=0, le=1e9)
    """price of a million tokens that a hosted policy model samples"""
    million_prompt_tokens: float = Field(0.0, ge=0, le=1e9)
    """price of a million tokens that a hosted policy model reads"""
