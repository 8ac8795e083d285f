"""Calls to a running vLLM that end in time, and the death of one: its processes end, or one no
longer answers.

Invariant: whoever waits for a dead engine hears of it. vLLM never answers a call that is pending
when its engine dies, nor any request of an engine one of whose shards hangs.

What vLLM says of its own scheduler, after every step: how many requests run and wait, and how full
its cache is.

vLLM calls it like one of its own loggers; only the few names that it needs are relied on.
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
LOOK_S = 0.5
"""Between two looks at whether vLLM's processes still run, while a call is pending."""


class VllmControl:
    """Of one `llm`. `limit_s`: what pause, resume and the like may take."""

    def __init__(self, api: VllmApi, llm: Any, limit_s: float) -> None:
        self._api = api
        self._llm = llm
        self._limit_s = limit_s
        self._watching: set[asyncio.Task[None]] = set()
        self.dead: str | None = None

    def check(self) -> None:
        """Raises EngineDeadError where it is dead."""
        if self.dead is None and self._llm.errored:
            self.dead = "vLLM's engine process ended"
        if self.dead is not None:
            raise EngineDeadError(
                f"the vLLM engine is gone: {self.dead}", hint="restart the worker"
            )

    def declare_dead(self, why: str) -> EngineDeadError:
        """Every request ends with an EngineDeadError; one for the caller to raise, too."""
        self.dead = self.dead or why
        self._llm.output_processor.propagate_error(self._api.engine_dead())
        return EngineDeadError(f"the vLLM engine is gone: {self.dead}", hint="restart the worker")

    async def ask(self, call: Awaitable[T], what: str, limit_s: float | None = None) -> T:
        """The answer to a control call. Raises EngineDeadError where there is none, and what vLLM
        raises.
        """
        limit_s = self._limit_s if limit_s is None else limit_s
        clock = asyncio.get_running_loop().time
        deadline = clock() + limit_s
        task = asyncio.ensure_future(call)
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=LOOK_S)
                if not task.done() and (self.dead or self._llm.errored):
                    raise self.declare_dead(f"vLLM's engine process ended during: {what}")
                if not task.done() and clock() > deadline:
                    raise self.declare_dead(f"no answer in {limit_s:g} s to: {what}")
            return self._answer(task, what)
        finally:
            task.cancel()

    def _answer(self, task: asyncio.Future[T], what: str) -> T:
        try:
            return task.result()
        except self._api.engine_dead as error:
            raise self.declare_dead(f"vLLM's engine process ended during: {what}") from error

    async def ask_shards(
        self, method: str, *args: object, limit_s: float | None = None
    ) -> list[Any]:
        """Call a method of `vllm_worker_extension` in every shard of every replica; what each
        answered.
        """
        core = self._llm.engine_core
        if not hasattr(core, "call_utility_all_async"):
            answers: list[Any] = await self.ask(
                self._llm.collective_rpc(method, args=args), method, limit_s
            )
            return answers
        # `collective_rpc` hands on what the first replica answered, alone
        calls = core.call_utility_all_async("collective_rpc", method, None, args, None)
        return [answer for replica in await self.ask(calls, method, limit_s) for answer in replica]

    def watch(self, busy: asyncio.Lock, every_s: float, limit_s: float) -> None:
        """Ask all shards for a sign of life, again and again; the first that gives none in
        `limit_s` is the end.

        Not while `busy` is held: an update may take longer than any forward pass, and has a limit
        of its own.
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
                return  # everybody who waits has heard of it
            except Exception as error:
                self.declare_dead(f"a shard cannot give a sign of life: {error}")

    async def close(self) -> None:
        """End whatever waits for vLLM, inside it and here; its processes are for the caller to end."""
        for task in self._watching:
            task.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)
        if self.dead is None and not self._llm.errored:
            try:
                await asyncio.wait_for(self._llm.pause_generation(mode="abort"), self._limit_s)
            except Exception as error:
                # The processes are ended next, whatever they say.
                logger.warning("vLLM did not abort its requests before the shutdown: %r", error)
        self.dead = self.dead or "shut down"
        await self._stop_listening()

    async def _stop_listening(self) -> None:
        """End vLLM's own loop: it would report the end of the process that it reads from as an
        error.
        """
        handler = getattr(self._llm, "output_handler", None)
        if handler is None:
            return
        handler.cancel()
        await asyncio.gather(handler, return_exceptions=True)
        # whoever still waits for an answer hears that there will be none
        self._llm.output_processor.propagate_error(self._api.engine_dead())


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
        running = sum(load.running for load in loads)
        waiting = sum(load.waiting for load in loads)
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
