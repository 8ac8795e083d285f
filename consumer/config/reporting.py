"""What the trainer reports of a run beside `steps.jsonl`: [samples] and [wandb]."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from buffer.config.section import Count, Section
from buffer.readable import Bytes


class SamplesSection(Section):
    """[samples]: the texts of each train step that are kept in `samples/` of the run's folder.

    They remain after the payloads are freed: `rolloutmq batch`, `rolloutmq show` and the browser
    view read them.
    """

    groups_per_step: Count = Field(4, ge=0, le=1024)
    """groups of each step whose texts are kept: the one with the best mean score, the one with the
    worst, and others at random, by run.seed and the step (1: the best); 0: none
    """
    report_every_steps: Count = Field(10, ge=1)
    """interval in train steps at which they are also passed to [trainer] writers, beginning with
    step 1
    """
    max_size: Annotated[Bytes, Field(ge=2**20, le=1 << 50)] = 2 * 2**30
    """bytes, as a number or text like "8GiB"; above it, the oldest files of `samples/` are deleted
    """


class WandbSection(Section):
    """[wandb]: the run at Weights & Biases; [trainer] writers enables it."""

    project: str = Field("rolloutmq", min_length=1, max_length=128)
    """name of the project"""
    name: str | None = Field(None, min_length=1, max_length=128)
    """name that is shown; default: the name of the run"""
    entity: str | None = Field(None, min_length=1, max_length=128)
    """user or team; default: that of the API key"""
    mode: Literal["online", "offline", "disabled"] | None = None
    """offline: write files only, for `wandb sync`; default: the environment variable WANDB_MODE,
    else online
    """
