"""Sample from a small model with transformers: slow, simple and exact, on any device of torch.

Invariant: requests and weights change only between two steps. A step runs in a thread and makes one
token for each running request. New weights drop all keys and values.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError

from buffer.imports import import_extra
from buffer.weights.safetensors_files import MODEL_LOADING, is_adapter
from buffer.wire.rollout import PolicyVersion
from buffer.wire.sampling import SampleParams
from buffer.wire.sampling_mask import RecordedMask, SamplingMask, joined_masks
from producer_workers.config.engine import TransformersConfig
from producer_workers.engines.base import (
    EngineDeadError,
    EngineError,
    EngineLoad,
    Generation,
    GenerationError,
    GrowingResponse,
    PauseMode,
    Scores,
    WeightsError,
)
from producer_workers.engines.hf.sampling import RoutedTokens, RoutingRecorder, Scoring, sample
from producer_workers.engines.model_folder import (
    AdapterCheck,
    ModelCheck,
    check_model_folder,
    read_shapes,
)

logger = logging.getLogger(__name__)
T = TypeVar("T")


class _Request(GrowingResponse):
    def __init__(
        self, request_id: str, prompt_ids: NDArray[np.int32], params: SampleParams
    ) -> None:
        super().__init__()
        self.group = request_id.partition("/")[0]
        self.prompt = prompt_ids.tolist()
        self.params = params
        self.generator = torch.Generator()
        self.generator.manual_seed(self.generator.seed() if params.seed is None else params.seed)
        self.cache: Any = None
        self.experts = RoutedTokens()
        self.masks: list[tuple[RecordedMask, int]] = []  # of each token
        self.error: Exception | None = None
        self.ended: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()

    def columns(self) -> dict[str, Any]:
        mask = joined_masks(self.masks) if self.masks else None
        return {"routed_experts": self.experts.whole(), "sampling_mask": mask}

    def settle(self) -> None:
        if self.ended.done():
            return
        if self.error:
            self.ended.set_exception(
                GenerationError(f"a request failed in transformers: {self.error!r}")
            )
        elif self.finish_reason:
            self.ended.set_result(self.generation())


class TransformersEngine:
    name = "transformers"

    def __init__(self, config: TransformersConfig, model_dir: Path, version: PolicyVersion) -> None:
        self._config = config
        self.records_masks = config.sampling_mask
        self._model_dir = model_dir
        self._version = version
        self._device = config.device
        if config.device == "auto":
            self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._model: Any = None
        self._recorder: RoutingRecorder | None = None
        self._tokenizer: Any = None
        self.max_model_len: int | None = None
        self._requests: dict[int, _Request | Scoring] = {}
        self._paused = False
        self._wake = asyncio.Event()
        self._lock = asyncio.Lock()  # held by a step, and by calls that must not run during one
        self._driver: asyncio.Task[None] | None = None
        self._dead: str | None = "not started"

    async def start(self) -> None:
        check_model_folder(self._model_dir)
        self._model_check = ModelCheck(self._model_dir)
        self._adapter_check = AdapterCheck(self._model_dir, self._model_check.shapes)
        self._model, self._recorder = await self._read(self._model_dir, EngineError)
        eos = self._model.generation_config.eos_token_id
        self._stop_ids = frozenset(eos if isinstance(eos, list) else {eos} - {None})
        self.max_model_len = getattr(self._model.config, "max_position_embeddings", None)
        self._dead = None
        self._driver = asyncio.create_task(self._drive())

    async def generate(
        self, request_id: str, prompt_ids: NDArray[np.int32], params: SampleParams
    ) -> Generation:
        self.check_health()
        self._check_prompt(prompt_ids)
        if params.structured:
            raise GenerationError(
                "the transformers engine cannot produce structured output",
                hint="use an engine of kind vllm or http",
            )
        request = _Request(request_id, prompt_ids, params)
        if params.stops and self._tokenizer is None:
            self._tokenizer = await asyncio.to_thread(_load_tokenizer, self._model_dir)
        return await self._answer(request, request.ended)

    async def score(
        self, request_id: str, ids: NDArray[np.int32], start: int, top_k: int = 0
    ) -> Scores:
        self.check_health()
        self._check_prompt(ids[:-1])
        self._check_prompt(ids[-1:])
        request = Scoring(request_id, ids.tolist(), start, top_k)
        return await self._answer(request, request.ended)

    async def _answer(self, request: _Request | Scoring, ended: asyncio.Future[T]) -> T:
        self._requests[id(request)] = request
        self._wake.set()
        try:
            return await ended
        finally:
            self._requests.pop(id(request), None)

    async def pause(self, mode: PauseMode) -> None:
        self.check_health()
        async with self._lock:
            self._paused = True
            if mode == "abort":
                self._abort()

    async def abort_others(self, spared: Collection[str]) -> None:
        self.check_health()
        async with self._lock:
            self._abort(spared)

    async def resume(self) -> None:
        self.check_health()
        self._paused = False
        self._wake.set()

    async def load_weights(self, path: Path, version: PolicyVersion) -> None:
        """Read weights while sampling continues; only the switch is between two steps."""
        self.check_health()
        check = self._adapter_check if is_adapter(path) else self._model_check
        await asyncio.to_thread(check.check, path)
        model, recorder = await self._read(path)
        async with self._lock:
            # the modules refer to each other: without this, their tensors stay for minutes
            self._model.to("meta")
            self._model = model
            self._recorder = recorder
            self._version = version
            for request in self._requests.values():
                request.cache = None  # keys and values of the old weights

    async def sleep(self) -> None:
        raise EngineError(
            "the transformers engine cannot sleep", hint="use an engine of kind vllm on shared GPUs"
        )

    async def wake(self) -> None:
        self.check_health()

    def version(self) -> PolicyVersion:
        return self._version

    def check_health(self) -> None:
        if self._dead is not None:
            raise EngineDeadError(
                f"the transformers engine is gone: {self._dead}", hint="restart the worker"
            )

    def load(self) -> EngineLoad:
        running = min(len(self._requests), self._config.max_num_seqs)
        return EngineLoad(running, len(self._requests) - running, 0.0)

    def unfinished(self) -> int:
        return len(self._requests)

    async def shutdown(self) -> None:
        async with self._lock:
            self._dead = self._dead or "shut down"
            self._abort()
            if self._driver:
                self._driver.cancel()
        self._model = None

    # -- steps

    async def _drive(self) -> None:
        while True:
            await self._wake.wait()
            async with self._lock:
                batch = list(islice(self._requests.values(), self._config.max_num_seqs))
                if self._paused or not batch:
                    self._wake.clear()
                    continue
                await asyncio.to_thread(self._step, batch)
            for request in batch:
                request.settle()
                if request.ended.done():
                    self._requests.pop(id(request), None)
            await asyncio.sleep(0)  # lets callers take their results and pause the engine

    @torch.inference_mode()
    def _step(self, batch: list[_Request | Scoring]) -> None:
        """Make one token for each request, or read a part; if one fails, the others continue."""
        for request in batch:
            if request.finish_reason:
                continue
            try:
                if isinstance(request, Scoring):
                    request.read_on(self._model, self._device)
                    if self._recorder:
                        self._recorder.take()
                else:
                    self._extend(request)
            except Exception as error:
                request.error = error

    def _extend(self, request: _Request) -> None:
        tokens = request.prompt + request.token_ids
        known = 0 if request.cache is None else len(tokens) - 1
        ids = torch.tensor([tokens[known:]], device=self._device)
        output = self._model(ids, past_key_values=request.cache, use_cache=True, logits_to_keep=1)
        request.cache = output.past_key_values
        params = request.params
        if self._recorder:
            request.experts.add(known, self._recorder.take())
        logits = output.logits[0, -1].cpu()
        stop_ids = self._stop_ids.union(params.stop_token_ids)
        token, logprob, kept = sample(
            logits, params, request.prompt, request.token_ids, stop_ids, request.generator
        )
        request.add([token], [logprob])
        if self.records_masks:
            mask = None
            if kept is not None:
                mask = SamplingMask(np.array([len(kept)], "<i4"), kept.numpy().astype("<i4"))
            request.masks.append((mask, 1))
        request.stamp(self._version)
        is_stopped = token in stop_ids
        if params.stops and len(request.token_ids) > params.min_tokens:
            text = self._tokenizer.decode(request.token_ids)
            is_stopped |= any(stop in text for stop in params.stops)
        if is_stopped:
            request.finish("stop")
        elif len(request.token_ids) >= params.max_tokens or len(tokens) + 1 == self.max_model_len:
            request.finish("length")

    def _abort(self, spared: Collection[str] = ()) -> None:
        for request in list(self._requests.values()):
            if request.group not in spared:
                request.finish("abort")
                request.settle()
                self._requests.pop(id(request), None)

    # -- weights

    async def _read(
        self, path: Path, kind: type[EngineError | WeightsError] = WeightsError
    ) -> tuple[Any, RoutingRecorder | None]:
        try:
            return await asyncio.to_thread(self._load, path)
        except (OSError, ValueError, TypeError, KeyError, RuntimeError, SafetensorError) as error:
            hint = "the old weights still run" if kind is WeightsError else ""
            raise kind(f"transformers cannot load {path}: {error}", hint=hint) from error

    # -- model

    def _check_prompt(self, prompt_ids: NDArray[np.int32]) -> None:
        if self.max_model_len is not None and len(prompt_ids) >= self.max_model_len:
            raise GenerationError(
                f"a prompt of {len(prompt_ids)} tokens is too long: "
                f"the model reads {self.max_model_len}"
            )
        size = int(self._model.config.vocab_size)
        if not len(prompt_ids) or int(prompt_ids.min()) < 0 or int(prompt_ids.max()) >= size:
            raise GenerationError(f"a prompt is empty, or has ids that are not below {size}")

    def _load(self, path: Path) -> tuple[Any, RoutingRecorder | None]:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging as their_logging

        their_logging.disable_progress_bar()
        config = None if self._model is None else self._model.config
        dtype = getattr(torch, self._config.dtype)
        with MODEL_LOADING:  # a cancelled update may still load when the next one begins
            model: Any = AutoModelForCausalLM.from_pretrained(
                self._model_dir if is_adapter(path) else path,
                config=config,
                dtype=dtype,
                local_files_only=True,
            )
            if is_adapter(path):
                _put_adapter_into(model, path)
        model = model.eval().to(self._device)
        return model, RoutingRecorder(model) if self._config.routed_experts else None


def _put_adapter_into(model: Any, folder: Path) -> None:
    """Change the model's layers as the adapter says. Raises WeightsError, ConfigError."""
    peft = import_extra("peft", "an adapter")
    inside: Any = peft.PeftModel.from_pretrained(model, folder)
    # PEFT would ignore missing and unknown tensors.
    if different := sorted(peft.get_peft_model_state_dict(inside).keys() ^ read_shapes(folder)):
        raise WeightsError(
            f"{folder} has other tensors than its config describes: "
            f"{len(different)} differ, first {different[0]}",
            hint="the old weights still run",
        )


def _load_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, local_files_only=True)
