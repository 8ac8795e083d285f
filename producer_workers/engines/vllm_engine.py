"""The real engine: vLLM's AsyncLLM inside the rollout worker.

Invariant: the engine runs the weights it names. An update happens between two forward passes, in one call,
with every cache of the old weights dropped; if it fails the old weights are loaded again, and if that fails
or anything stays unanswered the engine counts as dead.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from buffer.errors import RolloutMQError
from buffer.rollout import PolicyVersion, SampleParams
from buffer.weights_announcement import Announcement
from producer_workers.engines.base import (
    EngineDeadError,
    EngineError,
    Generation,
    GenerationError,
    PauseMode,
    WeightsError,
)
from producer_workers.engines.capabilities import EngineLoad
from producer_workers.engines.config import VllmConfig
from producer_workers.engines.environment import is_cpu_build, prepare_environment
from producer_workers.engines.model_folder import (
    Shapes,
    check_model_folder,
    check_same_tensors,
    has_tied_head,
    read_shapes,
)
from producer_workers.engines.vllm_adapter import VllmAdapter
from producer_workers.engines.vllm_answer import generation_of
from producer_workers.engines.vllm_api import (
    VllmApi,
    engine_arguments,
    import_vllm,
    sampling_arguments,
    structure_arguments,
)
from producer_workers.engines.vllm_images import VllmImages
from producer_workers.engines.vllm_receiving import load_received, receive_weights
from producer_workers.engines.vllm_statistics import VllmStatistics

logger = logging.getLogger(__name__)

T = TypeVar("T")
HEALTH_INTERVAL_S = 0.5


class VllmEngine:
    """Engine protocol over vLLM, for its CPU and its CUDA build."""

    name = "vllm"
    structures_output = True

    def __init__(self, config: VllmConfig, model_dir: Path, version: PolicyVersion) -> None:
        self._config = config
        self._model_dir = model_dir
        self._loaded_from = model_dir
        self._version = version
        self._shapes: Shapes = {}
        self._tied_head = False
        self._adapter: VllmAdapter | None = None
        self._api: VllmApi | None = None
        self._llm: Any = None
        self._paused = False
        self._requests: set[str] = set()
        self._statistics = VllmStatistics()
        self.images = VllmImages(model_dir)
        self._updating: asyncio.Task[None] | None = None
        self._lock = asyncio.Lock()  # pause, resume and updates come one after another
        self._dead: str | None = "not started"

    async def start(self) -> None:
        check_model_folder(self._model_dir)
        self._shapes = read_shapes(self._model_dir)
        self._tied_head = has_tied_head(self._model_dir)
        if self._config.max_lora_rank:
            self._adapter = VllmAdapter(self._model_dir, self._shapes, self._config.max_lora_rank)
            self._loaded_from = self._adapter.first
        on_cpu = is_cpu_build()
        prepare_environment(self._config, on_cpu=on_cpu)
        try:
            # In a thread: loading takes seconds to minutes, and the worker's other tasks go on.
            api, self._llm = await asyncio.to_thread(self._build, on_cpu)
        except EngineError:
            raise
        except Exception as error:
            raise EngineError(
                f"vLLM could not load {self._model_dir}: {error}", hint="its own log lines above say why"
            ) from error
        self._api, self._dead = api, None
        if self._adapter:
            await self._load(self._adapter.first)
        await self._name_weights(self._version)
        logger.info("vLLM %s runs %s as %s", api.version, self._model_dir, self._version)

    async def generate(self, request_id: str, prompt_ids: NDArray[np.int32], params: SampleParams) -> Generation:
        self.check_health()
        assert self._api is not None
        submitted = self._version
        final = None
        self._requests.add(request_id)
        try:
            sampling = self._sampling(params)
            shown = await self.images.prompt(self._llm, request_id, prompt_ids)
            prompt = shown or self._api.wrap_prompt(prompt_ids.tolist())
            adapter = self._adapter.request(self._loaded_from) if self._adapter else None
            async for output in self._llm.generate(prompt, sampling, request_id, lora_request=adapter):
                final = output
        except self._api.engine_dead as error:
            raise self._declare_dead("vLLM's engine process ended") from error
        except self._api.refused as error:
            raise GenerationError(f"vLLM refused request {request_id}: {error}") from error
        except RolloutMQError:
            raise
        except Exception as error:
            raise GenerationError(f"request {request_id} failed in vLLM: {error!r}") from error
        finally:
            self._requests.discard(request_id)
        if final is None:
            raise GenerationError(f"vLLM ended request {request_id} without an answer")
        return generation_of(final.outputs[0], submitted, len(prompt_ids))

    def _sampling(self, params: SampleParams) -> Any:
        assert self._api is not None
        structure = self._api.structured(**structure_arguments(params.structured)) if params.structured else None
        return self._api.sampling(
            **sampling_arguments(params), structured_outputs=structure, output_kind=self._api.final_only
        )

    async def pause(self, mode: PauseMode) -> None:
        self.check_health()
        async with self._lock:
            self._paused = True
            # The caches stay: they are dropped when weights change, and only then are they wrong.
            await self._control(self._llm.pause_generation(mode=mode, clear_cache=False), f"pause({mode})")

    async def abort_others(self, spared: Collection[str]) -> None:
        self.check_health()
        if others := [name for name in self._requests if name.partition("/")[0] not in spared]:
            await self._control(self._llm.abort(others), "abort of some requests")

    async def resume(self) -> None:
        self.check_health()
        async with self._lock:
            await self._control(self._llm.resume_generation(), "resume")
            self._paused = False

    async def load_weights(self, path: Path, version: PolicyVersion) -> None:
        self.check_health()
        await asyncio.to_thread(self._check_weights, path)
        await self._switch(path, version, lambda: self._load(path))

    def receives_weights(self) -> bool:
        return self._adapter is None

    async def receive_weights(self, announced: Announcement, version: PolicyVersion) -> None:
        self.check_health()
        path = Path(announced.folder)  # the way back from a later update that fails
        check_same_tensors(self._shapes, announced.tensors, path, tied_head=self._tied_head)
        try:
            await receive_weights(self._call_workers, announced, self._config.load_timeout_s)
        except (EngineDeadError, WeightsError):
            raise
        except Exception as error:
            raise WeightsError(f"vLLM could not receive the weights {announced.label}: {error}") from error
        await self._switch(path, version, lambda: load_received(self._call_workers))

    async def _switch(self, path: Path, version: PolicyVersion, load: Callable[[], Awaitable[None]]) -> None:
        # Shielded: a caller that gives up must not leave the engine paused between two sets of weights.
        self._updating = asyncio.create_task(self._update(path, version, load))
        await asyncio.shield(self._updating)

    async def _call_workers(self, method: str, *args: Any) -> list[Any]:
        """A method of the worker extension, in every process of the engine."""
        call = self._llm.collective_rpc(method, args=args)
        answers: list[Any] = await self._control(call, method, self._config.load_timeout_s)
        return answers

    async def sleep(self) -> None:
        """vLLM's sleep of level 1: weights go to the host's memory, the KV cache is dropped. CUDA only."""
        self.check_health()
        if not self._config.enable_sleep_mode:
            raise EngineError("this vLLM engine cannot sleep", hint="set [engine] enable_sleep_mode = true (CUDA only)")
        async with self._lock:
            await self._control(self._llm.sleep(level=1), "sleep")

    async def wake(self) -> None:
        self.check_health()
        async with self._lock:
            await self._control(self._llm.wake_up(), "wake up")

    def version(self) -> PolicyVersion:
        return self._version

    def check_health(self) -> None:
        if self._dead is None and self._llm.errored:
            self._dead = "vLLM's engine process ended"
        if self._dead is not None:
            raise EngineDeadError(f"the vLLM engine is gone: {self._dead}", hint="restart the worker")

    def unfinished(self) -> int:
        """How many requests run or wait inside vLLM."""
        return 0 if self._llm is None else int(self._llm.output_processor.get_num_unfinished_requests())

    def load(self) -> EngineLoad | None:
        return self._statistics.load

    async def shutdown(self) -> None:
        llm, self._llm = self._llm, None
        if llm is None:
            return
        if self._dead is None and not llm.errored:
            try:
                await asyncio.wait_for(llm.pause_generation(mode="abort"), self._config.control_timeout_s)
            except Exception as error:
                # The processes are ended next, whatever they say.
                logger.warning("vLLM did not abort its requests before the shutdown: %r", error)
        self._dead = "shut down"
        await self._stop_listening(llm)
        await asyncio.to_thread(llm.shutdown)
        # Its finalizer calls this once more, and prints a traceback if the interpreter is ending by then.
        llm.shutdown = lambda *_: None
        if self._adapter:
            self._adapter.close()

    async def _stop_listening(self, llm: Any) -> None:
        """End vLLM's own loop first: it would report the end of the process that it reads from as an error."""
        handler = getattr(llm, "output_handler", None)
        if handler is None or self._api is None:
            return
        handler.cancel()
        await asyncio.gather(handler, return_exceptions=True)
        # whoever still waits for an answer hears that there will be none
        llm.output_processor.propagate_error(self._api.engine_dead())

    def _build(self, on_cpu: bool) -> tuple[VllmApi, Any]:
        api = import_vllm()
        adapter = self._adapter.arguments() if self._adapter else {}
        arguments = api.arguments(**engine_arguments(self._config, self._model_dir, on_cpu=on_cpu), **adapter)
        loggers = [self._statistics.of_engine] if self._config.report_load else None
        return api, api.engine.from_engine_args(arguments, stat_loggers=loggers)

    async def _update(self, path: Path, version: PolicyVersion, load: Callable[[], Awaitable[None]]) -> None:
        async with self._lock:
            assert self._api is not None
            # Without version labels per token, a response must not span two versions.
            mode = "keep" if self._api.tracks_versions else "abort"
            pausing = self._llm.pause_generation(mode=mode, clear_cache=True)
            await self._control(pausing, "pausing for an update")
            try:
                await load()
                await self._name_weights(version)
                self._loaded_from, self._version = path, version
            except EngineDeadError:
                raise
            except Exception as error:
                await self._restore(error)
                raise WeightsError(f"vLLM could not load {path}: {error}", hint="the old weights still run") from error
            finally:
                if not self._paused and self._dead is None:
                    await self._control(self._llm.resume_generation(), "resuming after an update")

    def _check_weights(self, path: Path) -> None:
        if self._adapter:
            self._adapter.check(path)
        else:
            check_same_tensors(self._shapes, read_shapes(path), path, tied_head=self._tied_head)

    async def _load(self, path: Path) -> None:
        if self._adapter:
            call = self._llm.add_lora(self._adapter.request(path, replaces=True))
            if not await self._control(call, "loading an adapter", self._config.load_timeout_s):
                raise WeightsError(f"vLLM took no adapter from {path}")
            return
        await self._call_workers("rolloutmq_load_weights", str(path.resolve()))

    async def _name_weights(self, version: PolicyVersion) -> None:
        """From here on vLLM stamps every token with `version`."""
        if self._api is not None and self._api.tracks_versions:
            await self._control(self._llm.update_weight_version(str(version)), "naming the weights")

    async def _restore(self, cause: Exception) -> None:
        """Load the old weights again: a failed load may have replaced some of them."""
        try:
            await self._load(self._loaded_from)
        except EngineDeadError:
            raise
        except Exception as error:
            raise self._declare_dead(
                f"an update failed ({cause}), and so did the way back to {self._loaded_from} ({error})"
            ) from error

    async def _control(self, call: Awaitable[T], what: str, timeout_s: float | None = None) -> T:
        """Wait for a control call of vLLM: one that is pending when the engine dies never returns."""
        limit_s = self._config.control_timeout_s if timeout_s is None else timeout_s
        clock = asyncio.get_running_loop().time
        deadline = clock() + limit_s
        task = asyncio.ensure_future(call)
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=HEALTH_INTERVAL_S)
                if not task.done() and (self._llm is None or self._llm.errored):
                    raise self._declare_dead(f"vLLM's engine process ended during: {what}")
                if not task.done() and clock() > deadline:
                    raise self._declare_dead(f"no answer in {limit_s:g} s to: {what}")
            return self._answer(task, what)
        finally:
            task.cancel()

    def _answer(self, task: asyncio.Future[T], what: str) -> T:
        assert self._api is not None
        try:
            return task.result()
        except self._api.engine_dead as error:
            raise self._declare_dead(f"vLLM's engine process ended during: {what}") from error

    def _declare_dead(self, why: str) -> EngineDeadError:
        self._dead = self._dead or why
        return EngineDeadError(f"the vLLM engine is gone: {self._dead}", hint="restart the worker")
