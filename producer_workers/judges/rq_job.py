"""What an rq job of a judge holds, and what its work-horse does with it.

The dotted path of `score` is stored in Redis: it is part of the wire format. Everything in a job is plain JSON.
"""

from __future__ import annotations

import asyncio
import resource
from math import ceil
from typing import Any

from buffer.rollout import RolloutState
from producer_workers.judges.judge import judge_all
from producer_workers.judges.load import load_judge

FUNCTION = "producer_workers.judges.rq_job.score"

_CPU_GRACE_S = 1


def score(judge: str, rollouts: list[dict[str, Any]], timeout_s: float, memory_mb: int) -> list[dict[str, float]]:
    """The rewards that `judge` gives one rollout, or a group, in a process that may be spoilt. Raises JudgeError."""
    chosen = load_judge(judge)
    _limit(timeout_s, memory_mb)
    return asyncio.run(judge_all(chosen, [RolloutState(**fields) for fields in rollouts]))


def _limit(timeout_s: float, memory_mb: int) -> None:
    """rq's own time limit is a signal that Python must get to handle. The kernel's ends a loop in C, too."""
    _lower(resource.RLIMIT_AS, memory_mb * 2**20)
    used = resource.getrusage(resource.RUSAGE_SELF)
    _lower(resource.RLIMIT_CPU, ceil(used.ru_utime + used.ru_stime + timeout_s) + _CPU_GRACE_S)
    _lower(resource.RLIMIT_CORE, 0)


def _lower(limit: int, value: int) -> None:
    _, hard = resource.getrlimit(limit)
    most = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(limit, (most, most))
