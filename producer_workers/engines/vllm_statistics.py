"""What vLLM says of its own scheduler, after every step: how many requests run and wait, and how full its cache is.

vLLM calls it like one of its own loggers; only the few names that it needs are relied on.
"""

from __future__ import annotations

from typing import Any

from producer_workers.engines.capabilities import EngineLoad


class VllmStatistics:
    """`load` is that of the last step; None before the first."""

    load: EngineLoad | None = None

    def of_engine(self, _config: Any, _index: int = 0) -> VllmStatistics:
        """vLLM asks for one logger per engine; a worker has one."""
        return self

    def record(self, scheduler_stats: Any, *_: Any, **__: Any) -> None:
        if scheduler_stats is not None:
            stats = scheduler_stats
            self.load = EngineLoad(stats.num_running_reqs, stats.num_waiting_reqs, stats.kv_cache_usage)

    def log_engine_initialized(self) -> None: ...
    def log(self) -> None: ...
    def record_sleep_state(self, *_: Any) -> None: ...
