"""Sample at Tinker, as an engine of a worker: see tinker_trainer.py beside this file.

A sampling client of the service has fixed weights. So a request keeps those with which it began,
to its end, and new requests get the newest: every token has one exact version, and no update waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import tinker
from numpy.typing import NDArray

from buffer.errors import ConfigError
from buffer.weights.safetensors_files import read_header
from buffer.wire.rollout import PolicyVersion, VersionSpan
from buffer.wire.sampling import SampleParams
from producer_workers.config.engine import EngineSettings, PythonConfig
from producer_workers.engines.base import (
    EngineDeadError,
    EngineError,
    Generation,
    GenerationError,
    PauseMode,
    WeightsError,
)
from producer_workers.engines.model_folder import eos_ids

SAMPLER = "sampler.safetensors"
"""File of published weights: no tensor, and metadata with the path of a sampler's weights."""

SAMPLED = frozenset({"temperature", "top_p", "top_k", "max_tokens", "stop_token_ids", "seed"})
"""Sampling parameters that the service has."""

NOTHING = Generation(np.empty(0, "<i4"), np.empty(0, "<f4"), (), "abort")
"""The result of an aborted request: the service returns no part of a response."""


def base_model(config: EngineSettings) -> str:
    """Return the service's name of the model. Raises ConfigError."""
    options = config.options if isinstance(config, PythonConfig) else {}
    if "base_model" not in options:
        hint = 'for example options = { base_model = "Qwen/Qwen3-8B" }'
        raise ConfigError("[engine] options names no base_model of Tinker", hint=hint)
    return str(options["base_model"])


class TinkerEngine:
    name = "tinker"

    def __init__(self, config: PythonConfig, model_dir: Path, version: PolicyVersion) -> None:
        self._base_model = base_model(config)
        self._ends = sorted(eos_ids(model_dir))
        self._version = version
        self._service: Any = None
        self._sampler: Any = None
        self._requests: dict[asyncio.Task[Any], str] = {}
        self._running = asyncio.Event()
        self._dead: str | None = "not started"

    async def start(self) -> None:
        try:
            self._service = await asyncio.to_thread(tinker.ServiceClient)
            self._sampler = await self._new_sampler(base_model=self._base_model)
        except tinker.TinkerError as error:
            hint = "check TINKER_API_KEY, and base_model in [engine] options"
            raise EngineError(f"Tinker cannot be used: {error}", hint=hint) from error
        self._dead = None
        self._running.set()

    async def generate(
        self, request_id: str, prompt_ids: NDArray[np.int32], params: SampleParams
    ) -> Generation:
        self.check_health()
        if unknown := sorted(params.given().keys() - SAMPLED):
            raise GenerationError(
                f"Tinker cannot sample with {', '.join(unknown)}",
                hint="remove these keys from [tasks.NAME.sample]",
            )
        await self._running.wait()
        version = self._version
        asked = asyncio.ensure_future(self._ask(self._sampler, prompt_ids, params))
        self._requests[asked] = request_id.partition("/")[0]
        try:
            await asyncio.wait({asked})
        finally:
            asked.cancel()
            del self._requests[asked]
        return NOTHING if asked.cancelled() else _generation(asked.result(), version)

    async def _ask(self, sampler: Any, prompt_ids: NDArray[np.int32], params: SampleParams) -> Any:
        chosen = tinker.SamplingParams(
            max_tokens=params.max_tokens,
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k or -1,
            seed=params.seed,
            stop=[*params.stop_token_ids, *self._ends] or None,
        )
        try:
            prompt = tinker.ModelInput.from_ints(prompt_ids.tolist())
            answer = await sampler.sample(prompt, 1, chosen)
        except tinker.TinkerError as error:
            raise GenerationError(f"Tinker failed a request: {error}") from error
        await self._running.wait()  # what is finished in a pause is given after it
        return answer.sequences[0]

    async def pause(self, mode: PauseMode) -> None:
        self.check_health()
        self._running.clear()
        if mode == "abort":
            await self.abort_others(())

    async def abort_others(self, spared: Collection[str]) -> None:
        self.check_health()
        for asked, group in self._requests.items():
            if group not in spared:
                asked.cancel()

    async def resume(self) -> None:
        self.check_health()
        self._running.set()

    async def load_weights(self, path: Path, version: PolicyVersion) -> None:
        self.check_health()
        try:
            with (path / SAMPLER).open("rb") as file:
                name = read_header(file).metadata["path"]
            sampler = await self._new_sampler(model_path=name)
        except (OSError, ValueError, KeyError, tinker.TinkerError) as error:
            raise WeightsError(
                f"{path} names no weights of a sampler at Tinker: {error!r}",
                hint="publish them as examples/trainers/tinker_trainer.py does",
            ) from error
        self._sampler, self._version = sampler, version

    async def _new_sampler(self, **which: str) -> Any:
        return await asyncio.to_thread(
            lambda: self._service.create_sampling_client(**which).result()
        )

    async def sleep(self) -> None:
        raise EngineError("Tinker's devices cannot sleep", hint="unset [worker] sleep_when_paused")

    async def wake(self) -> None:
        self.check_health()

    def version(self) -> PolicyVersion:
        return self._version

    def check_health(self) -> None:
        if self._dead:
            raise EngineDeadError(f"the client of Tinker is {self._dead}")

    def unfinished(self) -> int:
        return len(self._requests)

    async def shutdown(self) -> None:
        if self._dead is None:
            await self.abort_others(())
            self._dead = "shut down"
            self._running.set()
        if self._service is not None:
            await asyncio.to_thread(lambda: self._service.close("success").result())
            self._service = None


def _generation(made: Any, version: PolicyVersion) -> Generation:
    ids, logprobs = np.asarray(made.tokens, "<i4"), np.asarray(made.logprobs, "<f4")
    span = VersionSpan(0, len(ids), version.version, version.lineage)
    return Generation(ids, logprobs, (span,) if len(ids) else (), made.stop_reason)
