"""Control a running vLLM engine.

Invariant: every caller that waits for a dead engine gets an EngineDeadError. vLLM itself never
answers a call that is pending when its engine dies or a shard hangs, so each call has a deadline
and watches vLLM's processes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable
from typing import Any, TypeVar

from producer_workers.engines.base import EngineDeadError, EngineLoad
from producer_workers.engines.vllm.api import VllmApi

logger = logging.getLogger(__name__)

T = TypeVar("T")
POLL_S = 0.5  # between two checks of vLLM's processes while a call is pending


class VllmControl:
    """Calls into one `llm`. `limit_s`: the deadline in seconds for pause, resume and the like."""

    def __init__(self, api: VllmApi, llm: Any, limit_s: float) -> None:
        self._api = api
        self._llm = llm
        self._limit_s = limit_s
        self._watching: set[asyncio.Task[None]] = set()
        self.dead: str | None = None

    def check(self) -> None:
        if self.dead is None and self._llm.errored:
            self.dead = "vLLM's engine process ended"
        if self.dead is not None:
            raise EngineDeadError(
                f"the vLLM engine is gone: {self.dead}", hint="restart the worker"
            )

    def declare_dead(self, why: str) -> EngineDeadError:
        self.dead = self.dead or why
        self._llm.output_processor.propagate_error(self._api.engine_dead())
        return EngineDeadError(f"the vLLM engine is gone: {self.dead}", hint="restart the worker")

    async def ask(self, call: Awaitable[T], what: str, limit_s: float | None = None) -> T:
        """Return the answer to a control call. Raises EngineDeadError, and vLLM's errors."""
        limit_s = self._limit_s if limit_s is None else limit_s
        clock = asyncio.get_running_loop().time
        deadline = clock() + limit_s
        task = asyncio.ensure_future(call)
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=POLL_S)
                if not task.done() and (self.dead or self._llm.errored):
                    raise self.declare_dead(f"vLLM's engine process ended during: {what}")
                if not task.done() and clock() > deadline:
                    raise self.declare_dead(f"no answer in {limit_s:g} s to: {what}")
            return task.result()
        except self._api.engine_dead as error:
            raise self.declare_dead(f"vLLM's engine process ended during: {what}") from error
        finally:
            task.cancel()

    async def freeze(self, *, clear_cache: bool) -> None:
        """Freeze every request between two forward passes; `clear_cache`: prefill them again later.

        vLLM's `pause_generation(mode="keep")` would also wait 20 ms for aborted requests.
        """
        if clear_cache:
            await self.ask(self._llm.renderer.clear_mm_cache_async(), "clearing the image cache")
        core = self._llm.engine_core
        await self.ask(core.pause_scheduler_async(mode="keep", clear_cache=clear_cache), "pause")

    async def ask_shards(
        self, method: str, *args: object, limit_s: float | None = None
    ) -> list[Any]:
        """Call a method of `WeightLoader` in every shard of every replica."""
        # vLLM's own `collective_rpc` returns the answers of the first replica alone.
        calls = self._llm.engine_core.call_utility_all_async(
            "collective_rpc", method, None, args, None
        )
        return [answer for replica in await self.ask(calls, method, limit_s) for answer in replica]

    def watch(self, busy: asyncio.Lock, every_s: float, limit_s: float) -> None:
        """Check regularly that each shard answers within `limit_s`; else declare the engine dead.

        It pauses while `busy` is held: an update may take longer than a forward pass, and has its
        own limit.
        """
        self._watching.add(asyncio.create_task(self._watch(busy, every_s, limit_s)))

    async def _watch(self, busy: asyncio.Lock, every_s: float, limit_s: float) -> None:
        while self.dead is None:
            await asyncio.sleep(every_s)
            if busy.locked():
                continue
            try:
                await self.ask_shards("rolloutmq_ready", limit_s=limit_s)
            except EngineDeadError:
                return  # `ask` has declared it dead
            except Exception as error:
                self.declare_dead(f"a shard failed its health check: {error}")

    async def close(self) -> None:
        """End everything that waits for vLLM; the caller ends vLLM's processes."""
        for task in self._watching:
            task.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)
        if self.dead is None and not self._llm.errored:
            try:
                await asyncio.wait_for(self._llm.pause_generation(mode="abort"), self._limit_s)
            except Exception as error:
                # The caller ends the processes next.
                logger.warning("vLLM did not abort its requests before the shutdown: %r", error)
        self.dead = self.dead or "shut down"
        # vLLM's output loop would report the end of its engine process as an error
        if handler := getattr(self._llm, "output_handler", None):
            handler.cancel()
            await asyncio.gather(handler, return_exceptions=True)
            # Callers that still wait for an answer will not get one.
            self._llm.output_processor.propagate_error(self._api.engine_dead())


class VllmStatistics:
    """The last load of each replica. vLLM calls it as a logger."""

    def __init__(self) -> None:
        self._replicas: dict[int, EngineLoad] = {}

    @property
    def load(self) -> EngineLoad | None:
        """Return the total of all replicas; None before the first step."""
        loads = self._replicas.values()
        if not loads:
            return None
        running = sum(load.running for load in loads)
        waiting = sum(load.waiting for load in loads)
        return EngineLoad(running, waiting, max(load.kv_usage for load in loads))

    def of_engine(self, _config: Any, _index: int = 0) -> VllmStatistics:
        """Return this logger, since vLLM asks for one per replica."""
        return self

    def record(self, scheduler_stats: Any, *_: Any, engine_idx: int = 0, **__: Any) -> None:
        stats = scheduler_stats
        if stats is not None:
            self._replicas[engine_idx] = EngineLoad(
                stats.num_running_reqs, stats.num_waiting_reqs, stats.kv_cache_usage
            )

    def log_engine_initialized(self) -> None: ...
    def log(self) -> None: ...
    def record_sleep_state(self, *_: Any) -> None: ...
