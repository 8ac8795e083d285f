"""Run vLLM's AsyncLLM inside the rollout worker.

Invariant: every shard runs the weights that the engine names. An update happens between two forward
passes, while the engine is paused; the version is named once all shards have loaded their part. If
one fails, all load the old weights again; if that fails too, or a shard does not answer, the engine
is dead. Later requests never use a KV cache of older weights.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray
from safetensors.numpy import save_file

from buffer.errors import RolloutMQError
from buffer.weights.safetensors_files import ADAPTER_CONFIG, ADAPTER_TENSORS, PEFT_PREFIX
from buffer.wire.rollout import PolicyVersion
from buffer.wire.sampling import SampleParams
from producer_workers.config.engine import VllmConfig
from producer_workers.engines.base import (
    EngineDeadError,
    EngineError,
    EngineLoad,
    Generation,
    GenerationError,
    PauseMode,
    Scores,
    WeightsError,
)
from producer_workers.engines.model_folder import (
    AdapterCheck,
    ModelCheck,
    Shapes,
    check_model_folder,
)
from producer_workers.engines.vllm.api import (
    VllmApi,
    engine_arguments,
    generation_of,
    is_cpu_build,
    keeps_cache,
    masked,
    prepare_environment,
    sampling_arguments,
    scores_of,
    structure_arguments,
)
from producer_workers.engines.vllm.control import VllmControl, VllmStatistics
from producer_workers.engines.vllm.images import VllmImages

logger = logging.getLogger(__name__)

HEALTH_CHECK_S = 10.0  # each check waits for the running forward pass


ADAPTER_NAME = "policy"
ADAPTER_NUMBER = 1
ZEROED = "q_proj"  # the layer of the adapter of zeros


class VllmAdapter(AdapterCheck):
    """The adapters of one engine, up to rank `most`. Raises EngineError without a `q_proj`.

    The first one is of zeros; running requests continue under a newer one.
    """

    def __init__(self, model_dir: Path, shapes: Shapes, most: int) -> None:
        super().__init__(model_dir, shapes, most)
        self._scratch = TemporaryDirectory(prefix="rolloutmq-adapter-")
        self.first = Path(self._scratch.name)
        _write_zeros(self.first, shapes)

    def arguments(self) -> dict[str, Any]:
        return {"enable_lora": True, "max_lora_rank": self._most, "max_loras": 1}

    def request(self, folder: Path) -> Any:
        """Return the LoRARequest that each request carries."""
        return import_module("vllm.lora.request").LoRARequest(
            ADAPTER_NAME, ADAPTER_NUMBER, str(folder.resolve())
        )

    def loading(self, folder: str) -> tuple[str, str, int, str]:
        """Return the `WeightLoader` call that replaces the adapter with the one in `folder`."""
        return "rolloutmq_load_adapter", ADAPTER_NAME, ADAPTER_NUMBER, folder

    def close(self) -> None:
        self._scratch.cleanup()


def _write_zeros(folder: Path, shapes: Shapes) -> None:
    name = next((name for name in sorted(shapes) if name.endswith(f".{ZEROED}.weight")), None)
    if name is None:
        raise EngineError(
            f"the model has no layer {ZEROED}, which the first adapter needs",
            hint="unset [engine] max_lora_rank",
        )
    out, into = shapes[name]
    stem = PEFT_PREFIX + name.removesuffix(".weight")
    zeros = {
        f"{stem}.lora_A.weight": np.zeros((8, into), "<f4"),
        f"{stem}.lora_B.weight": np.zeros((out, 8), "<f4"),
    }
    save_file(zeros, folder / ADAPTER_TENSORS)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": 8,
        "lora_alpha": 8,
        "target_modules": [ZEROED],
        "bias": "none",
    }
    (folder / ADAPTER_CONFIG).write_bytes(orjson.dumps(config))


class VllmEngine:
    name = "vllm"
    structures_output = True

    def __init__(self, config: VllmConfig, model_dir: Path, version: PolicyVersion) -> None:
        self._config = config
        self.records_masks = config.sampling_mask
        self._model_dir = model_dir
        self._loaded_from = model_dir
        self._version = version
        self._adapter: VllmAdapter | None = None
        self._api: VllmApi | None = None
        self._llm: Any = None
        self._control: VllmControl | None = None
        self._paused = False
        self._keeps_cache = False
        self._requests: set[str] = set()
        self._statistics = VllmStatistics()
        self.images = VllmImages(model_dir)
        self.max_model_len: int | None = None
        self._updating: asyncio.Task[None] | None = None
        self._lock = asyncio.Lock()  # orders pause, resume, sleep and updates

    async def start(self) -> None:
        check_model_folder(self._model_dir)
        self._keeps_cache = keeps_cache(self._config, self._model_dir)
        check = ModelCheck(self._model_dir)
        self._check_weights = check.check
        if self._config.max_lora_rank:
            self._adapter = VllmAdapter(self._model_dir, check.shapes, self._config.max_lora_rank)
            self._loaded_from = self._adapter.first
            self._check_weights = self._adapter.check
        on_cpu = is_cpu_build()
        prepare_environment(self._config, on_cpu=on_cpu)
        try:
            # In a thread: loading takes seconds to minutes.
            api, self._llm = await asyncio.to_thread(self._build, on_cpu)
        except EngineError:
            raise
        except Exception as error:
            hint = "see vLLM's log lines above"
            raise EngineError(
                f"vLLM could not load {self._model_dir}: {error}", hint=hint
            ) from error
        self._api = api
        self.max_model_len = int(self._llm.model_config.max_model_len)
        self._control = VllmControl(api, self._llm, self._config.control_timeout_s)
        await self._control.ask_shards("rolloutmq_ready")
        if self._adapter:
            await self._load(self._adapter.first)
        await self._name_weights(self._version)
        self._control.watch(self._lock, HEALTH_CHECK_S, self._config.hang_timeout_s)
        logger.info("vLLM runs %s as %s", self._model_dir, self._version)

    async def generate(
        self, request_id: str, prompt_ids: NDArray[np.int32], params: SampleParams
    ) -> Generation:
        def sampling() -> Any:
            assert self._api is not None
            structure = None
            if params.structured:
                structure = self._api.structured(**structure_arguments(params.structured))
            return self._api.sampling(
                **sampling_arguments(masked(params) if self.records_masks else params),
                structured_outputs=structure,
                output_kind=self._api.final_only,
                logprobs=0,
                flat_logprobs=True,  # plain lists instead of a dict per token
                detokenize=bool(params.stops),  # text is made only where it decides the stop
                skip_clone=True,
            )

        final = await self._ask(request_id, prompt_ids, sampling)
        return generation_of(final.outputs[0], len(prompt_ids))

    async def score(
        self, request_id: str, ids: NDArray[np.int32], start: int, top_k: int = 0
    ) -> Scores:
        self._running()
        assert self._api is not None
        if self._adapter:  # its layers break the engine
            raise GenerationError("vLLM cannot score texts with [engine] max_lora_rank")
        params = self._api.sampling(
            top_k=1,  # not temperature 0, which an engine that records masks refuses
            max_tokens=1,  # vLLM makes at least one
            prompt_logprobs=top_k,
            output_kind=self._api.final_only,
            flat_logprobs=True,
            detokenize=False,
        )
        return scores_of(await self._ask(request_id, ids, lambda: params), start, top_k)

    async def _ask(
        self, request_id: str, prompt_ids: NDArray[np.int32], sampling: Callable[[], Any]
    ) -> Any:
        """Return vLLM's last output of a request."""
        control = self._running()
        assert self._api is not None
        final = None
        self._requests.add(request_id)
        try:
            params = sampling()
            shown = await self.images.prompt(self._llm, request_id, prompt_ids)
            prompt = shown or self._api.tokens_input(prompt_ids.tolist())
            # Requests share the KV cache of one version only.
            prompt["cache_salt"] = str(self._version)
            adapter = self._adapter.request(self._loaded_from) if self._adapter else None
            async for output in self._llm.generate(
                prompt, params, request_id, lora_request=adapter
            ):
                final = output
        except self._api.engine_dead as error:
            raise control.declare_dead("vLLM's engine process ended") from error
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
        return final

    async def pause(self, mode: PauseMode) -> None:
        control = self._running()
        async with self._lock:
            self._paused = True
            # The caches stay valid until the weights change.
            if mode == "keep":
                await control.freeze(clear_cache=False)
            else:
                await control.ask(
                    self._llm.pause_generation(mode=mode, clear_cache=False), f"pause({mode})"
                )

    async def abort_others(self, spared: Collection[str]) -> None:
        control = self._running()
        if others := [name for name in self._requests if name.partition("/")[0] not in spared]:
            await control.ask(self._llm.abort(others), "abort of some requests")

    async def resume(self) -> None:
        control = self._running()
        async with self._lock:
            await control.ask(self._llm.resume_generation(), "resume")
            self._paused = False

    async def load_weights(self, path: Path, version: PolicyVersion) -> None:
        self._running()
        await asyncio.to_thread(self._check_weights, path)
        # Shielded: a caller that gives up must not leave the engine paused between two sets of
        # weights.
        self._updating = asyncio.create_task(self._update(path, version))
        await asyncio.shield(self._updating)

    async def sleep(self) -> None:
        """Move the weights to the host's memory and drop the KV cache (level 1, CUDA only)."""
        control = self._running()
        if not self._config.enable_sleep_mode:
            raise EngineError(
                "this vLLM engine cannot sleep",
                hint="set [engine] enable_sleep_mode = true (CUDA only)",
            )
        async with self._lock:
            # it copies all weights, as an update does
            await control.ask(self._llm.sleep(level=1), "sleep", self._config.load_timeout_s)

    async def wake(self) -> None:
        control = self._running()
        async with self._lock:
            await control.ask(self._llm.wake_up(), "wake up", self._config.load_timeout_s)
            if self._paused:  # waking up also resumes vLLM
                await control.freeze(clear_cache=False)

    def version(self) -> PolicyVersion:
        return self._version

    def check_health(self) -> None:
        self._running()

    def _running(self) -> VllmControl:
        if self._control is None:
            raise EngineDeadError("the vLLM engine is gone: not started", hint="restart the worker")
        self._control.check()
        return self._control

    def unfinished(self) -> int:
        if self._llm is None:
            return 0
        return int(self._llm.output_processor.get_num_unfinished_requests())

    def load(self) -> EngineLoad | None:
        return self._statistics.load

    async def shutdown(self) -> None:
        llm = self._llm
        control = self._control
        self._llm = None
        if llm is None:
            return
        if control:
            await control.close()
        await asyncio.to_thread(llm.shutdown)
        # Its finalizer calls this again, and prints a traceback where the interpreter is ending.
        llm.shutdown = lambda *_: None
        if self._adapter:
            self._adapter.close()

    def _build(self, on_cpu: bool) -> tuple[VllmApi, Any]:
        api = VllmApi()
        adapter = self._adapter.arguments() if self._adapter else {}
        arguments = api.arguments(
            **engine_arguments(self._config, self._model_dir, on_cpu=on_cpu), **adapter
        )
        loggers = [self._statistics.of_engine] if self._config.report_load else None
        return api, api.engine.from_engine_args(arguments, stat_loggers=loggers)

    async def _update(self, path: Path, version: PolicyVersion) -> None:
        control = self._running()
        async with self._lock:
            await control.freeze(clear_cache=not self._keeps_cache)
            try:
                await self._load(path)
                await self._name_weights(version)
                self._loaded_from = path
                self._version = version
            except EngineDeadError:
                raise
            except Exception as error:
                await self._restore(control, error)
                raise WeightsError(
                    f"vLLM could not load {path}: {error}", hint="the old weights still run"
                ) from error
            finally:
                if not self._paused and control.dead is None:
                    await control.ask(self._llm.resume_generation(), "resuming after an update")

    async def _load(self, path: Path) -> None:
        folder = str(path.resolve())
        call: tuple[Any, ...] = ("rolloutmq_load_weights", folder)
        if self._adapter:
            call = self._adapter.loading(folder)
        await self._running().ask_shards(*call, limit_s=self._config.load_timeout_s)

    async def _name_weights(self, version: PolicyVersion) -> None:
        """Make vLLM label every later token with `version`, in every replica."""
        naming = self._llm.update_weight_version(str(version))
        await self._running().ask(naming, "naming the weights")

    async def _restore(self, control: VllmControl, cause: Exception) -> None:
        """Load the old weights again: the failed load may have replaced some."""
        try:
            await self._load(self._loaded_from)
            await self._name_weights(self._version)
        except EngineDeadError:
            raise
        except Exception as error:
            why = f"an update failed ({cause}), and so did restoring {self._loaded_from} ({error})"
            raise control.declare_dead(why) from error
