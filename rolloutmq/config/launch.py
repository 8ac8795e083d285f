"""[launch]: the processes of a run that `rolloutmq run` starts."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from buffer.config.section import Count, Section
from buffer.limits import Bytes

Gpu = Annotated[int, Field(ge=0, le=1023)]


class LaunchSection(Section):
    """[launch]: what `rolloutmq run` starts on this machine."""

    workers: int = Field(2, ge=1, le=1024)
    """rollout workers, one process each"""
    colocated: bool = False
    """trainer and workers share the same GPUs and must fit in their memory together; otherwise a
    GPU that both use is an error
    """
    trainer_ranks: int | None = Field(None, ge=1, le=1024)
    """processes of the trainer, each with one GPU and its shard of the model; default: one for each
    of trainer_gpus, or one in all with a trainer.loop of yours
    """
    trainer_gpus: list[Gpu] | None = None
    """GPUs of the trainer; default: the first ones, as many as it has processes"""
    worker_gpus: list[Gpu] | None = None
    """GPUs of the workers; each worker gets as many as its engine has shards; default: all others
    """
    teacher_gpus: list[Gpu] | None = None
    """GPUs of the teachers, in the order of the config; each of their processes gets as many as its
    engine has shards; default: the last ones
    """
    judge_workers: int = Field(1, ge=1, le=1024)
    """processes that judge, if a task has judging of kind rq"""
    max_restarts: Count = Field(20, ge=0)
    """restarts of a process that died before the run ends with an error"""
    log_bytes: Annotated[Bytes, Field(ge=1 << 16, le=1 << 50)] = 64 << 20
    """size at which the log of a process becomes NAME.log.1, in place of the older one, and
    NAME.log starts anew; as a number or text like 64MiB
    """

    def ranks(self, *, has_own_loop: bool) -> int:
        """Return the number of processes of the trainer; `has_own_loop`: with trainer.loop."""
        gpus = 1 if has_own_loop else len(self.trainer_gpus or [0])
        return self.trainer_ranks or gpus
