"""What vLLM says of its own scheduler, after every step: how many requests run and wait, and how full its cache is.

vLLM calls it like one of its own loggers; only the few names that it needs are relied on.
"""

from __future__ import annotations

from typing import Any

from producer_workers.engines.capabilities import EngineLoad


class VllmStatistics:
    """What the steps of all data-parallel replicas said last."""

    def __init__(self) -> None:
        self._replicas: dict[int, EngineLoad] = {}

    @property
    def load(self) -> EngineLoad | None:
        """Of all of them together, with the fullest cache; None before the first step."""
        loads = self._replicas.values()
        if not loads:
            return None
        running, waiting = sum(load.running for load in loads), sum(load.waiting for load in loads)
        return EngineLoad(running, waiting, max(load.kv_usage for load in loads))

    def of_engine(self, _config: Any, _index: int = 0) -> VllmStatistics:
        """vLLM asks for one logger per replica; a worker has one."""
        return self

    def record(self, scheduler_stats: Any, *_: Any, engine_idx: int = 0, **__: Any) -> None:
        if scheduler_stats is not None:
            stats = scheduler_stats
            self._replicas[engine_idx] = EngineLoad(
                stats.num_running_reqs, stats.num_waiting_reqs, stats.kv_cache_usage
            )

    def log_engine_initialized(self) -> None: ...
    def log(self) -> None: ...
    def record_sleep_state(self, *_: Any) -> None: ...
