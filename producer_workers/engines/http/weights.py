"""Load whole weights or LoRA adapters into a server, which sees the folders under the same path."""

from __future__ import annotations

import asyncio
from pathlib import Path
from uuid import uuid4

from buffer.wire.rollout import PolicyVersion
from producer_workers.config.engine import HttpConfig
from producer_workers.engines.http.server import CompletionServer
from producer_workers.engines.model_folder import AdapterCheck, ModelCheck
from producer_workers.engines.vllm.api import EXTENSION

PREFIX = "rolloutmq-"  # of our adapters' names


class ServerWeights:
    """Whole weights. All methods raise ServerGone, ServerRefusal; `check` raises WeightsError."""

    hint = (
        "start vLLM with VLLM_SERVER_DEV_MODE=1 and --worker-extension-cls "
        f"{EXTENSION}; or set [engine] weights = 'static'"
    )

    def __init__(self, server: CompletionServer, config: HttpConfig, model_dir: Path) -> None:
        self._server = server
        self._config = config
        self._model_dir = model_dir

    async def take_over(self, version: PolicyVersion) -> None:
        """Load the first weights: the server may have an earlier worker's."""
        control_s = self._config.control_timeout_s
        self._model = await asyncio.to_thread(ModelCheck, self._model_dir)
        await self._server.call_workers("rolloutmq_ready", timeout_s=control_s)
        await self._server.pause("abort", control_s)
        await self._load_whole(self._model_dir)
        await self._name(version)
        await self._server.resume(control_s)

    async def check(self, path: Path) -> None:
        await asyncio.to_thread(self._model.check, path)

    async def load(self, path: Path, version: PolicyVersion) -> None:
        """Load and name weights, while nothing is sampled."""
        await self._load_whole(path)
        await self._name(version)

    async def _load_whole(self, path: Path) -> None:
        await self._server.call_workers(
            "rolloutmq_load_weights", str(path.resolve()), timeout_s=self._config.load_timeout_s
        )

    async def _name(self, version: PolicyVersion) -> None:
        await self._server.drop_caches(self._config.control_timeout_s)
        await self._server.name_weights(str(version), self._config.control_timeout_s)


class ServerAdapters(ServerWeights):
    """LoRA adapters over the first weights, each under a new name, which requests then use.

    If one replaced another of the same name, vLLM 0.32 would read its folder in every forward pass.
    """

    hint = (
        f"{ServerWeights.hint.partition('; or')[0]}, "
        "with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-lora --max-lora-rank RANK"
    )

    async def take_over(self, version: PolicyVersion) -> None:
        await self._server.check_adapters(self._config.control_timeout_s)
        self._base = self._server.model
        for name in await self._server.models():
            if name.startswith(PREFIX):  # of a worker that died
                await self._server.unload_adapter(name, self._config.control_timeout_s)
        await super().take_over(version)
        self._adapters = AdapterCheck(self._model_dir, self._model.shapes)

    async def check(self, path: Path) -> None:
        await asyncio.to_thread(self._adapters.check, path)

    async def load(self, path: Path, version: PolicyVersion) -> None:
        older = self._server.model
        newer = self._base
        if path != self._model_dir:  # else back to the base, after a first adapter that failed
            newer = PREFIX + uuid4().hex[:12]
            await self._server.load_adapter(newer, str(path.resolve()), self._config.load_timeout_s)
        await self._name(version)
        self._server.model = newer
        if older not in (newer, self._base):
            await self._server.unload_adapter(str(older), self._config.control_timeout_s)
