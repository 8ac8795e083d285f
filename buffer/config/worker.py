"""The config file as the producing side reads it: the shared sections, [engine], [worker],
[producer], [judges].
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from buffer.config.config import ConfigFile
from buffer.config.engine import EngineConfig, VllmConfig
from buffer.config.loader import Section


class WorkerSection(Section):
    """[worker]: one rollout worker."""

    concurrency: Annotated[int, Field(ge=1, le=1024)] | Literal["auto"] = 8
    """groups that are sampled at once, while others are judged; more would wait in the engine's own
    queue, where no other worker can take them. auto: as many as keep the engine full, found by
    looking at queue and KV cache
    """
    agent_loop: str = "single_turn"
    """how a group is generated: single_turn, multi_turn, tools, gateway, or your own class as
    package.module:Class
    """
    tasks: list[str] | None = None
    """the tasks that this worker serves; default: all of them"""
    lanes: list[Literal["eval", "resume", "fresh"]] = Field(
        default=["eval", "resume", "fresh"], min_length=1
    )
    """the lanes that it serves: eval (evaluations), resume (what was begun elsewhere), fresh (new
    prompts)
    """
    drain_timeout_s: float = Field(60.0, ge=0)
    """how long a worker that was told to stop finishes what it holds before it hands the rest back"""
    sleep_when_paused: bool = False
    """the engine gives its device memory back while the run is paused (abort, drain), for a trainer
    on the same GPU
    """
    start_timeout_s: float = Field(600.0, gt=0)
    """how long the engine may take to load its model"""


class ProducerSection(Section):
    """[producer]: what becomes a job."""

    max_prompt_tokens: int | None = Field(None, ge=1)
    """longer prompts are counted and passed over; default: no limit"""
    slice_size: int = Field(64, ge=1, le=512)
    """groups per enqueue"""


class JudgesSection(Section):
    """[judges]: the rq queue of tasks with judging of kind rq."""

    redis_url: str | None = Field(None, repr=False)
    """one Redis or Valkey server for that queue, not a cluster, which rq cannot use; default: the
    run's server
    """


class ProducingConfig(ConfigFile):
    """What producer and workers need."""

    engine: EngineConfig = VllmConfig()
    worker: WorkerSection = WorkerSection()
    producer: ProducerSection = ProducerSection()
    judges: JudgesSection = JudgesSection()
