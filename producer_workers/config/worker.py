"""The processes that make rollouts: [worker], [producer] and [judges]."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from buffer.config.section import YEAR_S, Count, Section
from buffer.limits import Concurrency


class WorkerSection(Section):
    """[worker]: one rollout worker."""

    concurrency: Concurrency = 8
    """groups that are sampled at once, in addition to those that only wait for their judge; more
    would wait in the engine's own queue, where no other worker can take them. auto: as many as keep
    the engine full, controlled by its queue and its KV cache
    """
    agent_loop: str = "single_turn"
    """how a group is generated: single_turn, multi_turn, tools, gateway, or a class of yours as
    package.module:Class
    """
    key_file: Path | None = None
    """file with the key (`rolloutmq key`) with which this worker signs what it submits; default: it
    signs nothing
    """
    tasks: list[str] | None = None
    """the tasks that this worker serves; default: all tasks"""
    lanes: list[Literal["eval", "resume", "fresh"]] = Field(
        default=["eval", "resume", "fresh"], min_length=1
    )
    """the lanes that this worker serves: eval (evaluations), resume (groups that were interrupted),
    fresh (new prompts)
    """
    drain_timeout_s: float = Field(60.0, ge=0, le=YEAR_S)
    """time in which a worker that is stopped finishes its groups before it returns the rest"""
    sleep_when_paused: bool = False
    """the engine frees its device memory while the run is paused by abort or drain, for a trainer
    on the same GPU
    """
    start_timeout_s: float = Field(600.0, gt=0, le=YEAR_S)
    """time in which the engine must have loaded its model"""


class ProducerSection(Section):
    """[producer]: which prompts become jobs, and how many at once."""

    max_prompt_tokens: Count | None = Field(None, ge=1)
    """longer prompts are skipped and counted; default: no limit"""
    slice_size: int = Field(64, ge=1, le=128)
    """largest number of groups that one script enqueues"""
    key_file: Path | None = None
    """file with the key of the name `producer` (`rolloutmq key`), with which prompts are signed;
    default: they are not
    """


class JudgesSection(Section):
    """[judges]: the rq queue of tasks with judging of kind rq."""

    redis_url: str | None = Field(None, repr=False)
    """URL of one Redis or Valkey server for that queue; not a cluster, which rq cannot use;
    default: the server of the run
    """
