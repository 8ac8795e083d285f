"""How new weights get into a server that runs elsewhere: whole ones over those it has, or LoRA
adapters beside them.

Both read folders that the server sees under the same path. Endpoints: vLLM 0.32, see
`completion_server.py`.

What a server does, by experiment, since no API says it: what its logprobs are of, if it keeps to a
structure.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from uuid import uuid4

from buffer.config.engine import HttpConfig
from buffer.model.rollout import PolicyVersion
from producer_workers.engines.base import EngineError, GenerationError
from producer_workers.engines.http.server import CompletionServer, ServerRefusal
from producer_workers.engines.model_folder import (
    AdapterCheck,
    Shapes,
    check_same_tensors,
    has_tied_head,
    read_shapes,
)

PREFIX = "rolloutmq-"
"""What the server's names of our adapters begin with."""


class ServerWeights:
    """Whole weights. All methods raise ServerGone and ServerRefusal; `check` raises WeightsError."""

    hint = (
        "start vLLM with VLLM_SERVER_DEV_MODE=1 and --worker-extension-cls "
        "producer_workers.engines.vllm.worker_extension.WeightLoader; or set [engine] weights = 'static'"
    )
    """what a server must have been started with"""

    def __init__(self, server: CompletionServer, config: HttpConfig, model_dir: Path) -> None:
        self._server = server
        self._config = config
        self._model_dir = model_dir
        self._shapes: Shapes = {}
        self._tied_head = False

    async def take_over(self, version: PolicyVersion) -> None:
        """Load the first weights: the server may have others, of an earlier worker or half an
        update of its.
        """
        control_s = self._config.control_timeout_s
        self._shapes = await asyncio.to_thread(read_shapes, self._model_dir)
        self._tied_head = has_tied_head(self._model_dir)
        await self._server.call_workers("rolloutmq_ready", timeout_s=control_s)
        await self._server.pause("abort", control_s)
        await self._load_whole(self._model_dir)
        await self._name(version)
        await self._server.resume(control_s)

    async def check(self, path: Path) -> None:
        """Whether the weights in `path` fit, by their headers."""
        shapes = await asyncio.to_thread(read_shapes, path)
        check_same_tensors(self._shapes, shapes, path, tied_head=self._tied_head)

    async def load(self, path: Path, version: PolicyVersion) -> None:
        """While nothing is sampled."""
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
    """LoRA adapters over the first weights. A newer one has a new name, by which it is then asked
    for: one that took the other's place would be read from its folder again in every forward pass
    (vLLM 0.32).
    """

    hint = (
        f"{ServerWeights.hint.partition('; or')[0]}, with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-lora "
        "--max-lora-rank RANK"
    )

    async def take_over(self, version: PolicyVersion) -> None:
        await self._server.check_adapters(self._config.control_timeout_s)
        self._base = self._server.model
        for name in await self._server.names():
            if name.startswith(PREFIX):  # of a worker that died
                await self._server.unload_adapter(name, self._config.control_timeout_s)
        await super().take_over(version)
        self._fits = AdapterCheck(self._model_dir, self._shapes)

    async def check(self, path: Path) -> None:
        await asyncio.to_thread(self._fits.check, path)

    async def load(self, path: Path, version: PolicyVersion) -> None:
        older = self._server.model
        newer = self._base
        if path != self._model_dir:  # the way back from a first adapter that could not be loaded
            newer = PREFIX + uuid4().hex[:12]
            await self._server.load_adapter(newer, str(path.resolve()), self._config.load_timeout_s)
        await self._name(version)
        self._server.model = newer
        if older not in (newer, self._base):
            await self._server.unload_adapter(str(older), self._config.control_timeout_s)


def weights_of(server: CompletionServer, config: HttpConfig, model_dir: Path) -> ServerWeights:
    """As [engine] weights says."""
    return (ServerAdapters if config.weights == "adapters" else ServerWeights)(
        server, config, model_dir
    )


PROBES = ([11, 12, 13], [21, 3, 8, 5], [7])
ENOUGH = 1e-3
"""Logprobs that are nearer to each other, in nats, say nothing."""


async def check_logprobs(server: CompletionServer) -> None:
    """Raises EngineError unless tokens come with ids, and with logprobs of what they were drawn
    from.

    Half the temperature doubles the distance between two logprobs; where they are taken before it,
    nothing moves.
    """
    try:
        async for _ in server.stream(PROBES[0], {"max_tokens": 1}):
            pass
    except GenerationError as error:
        raise EngineError(error.message, hint=error.hint) from error
    for prompt in PROBES:
        plain, cold = [await server.top_logprobs(prompt, temperature) for temperature in (1.0, 0.5)]
        near = plain[-1] - plain[0]
        far = cold[-1] - cold[0]
        if near <= ENOUGH:
            continue
        if far < 1.5 * near:
            hint = "start vLLM with --logprobs-mode processed_logprobs"
            raise EngineError(
                f"{server.url} reports logprobs before temperature and top-p", hint=hint
            )
        return
    raise EngineError(
        f"{server.url} gave the same logprob to any two tokens", hint="is it a language model?"
    )


async def keeps_to_a_structure(server: CompletionServer) -> bool:
    """Whether `structured_outputs` counts: most servers pass over a field that they do not know."""
    only = "a7-b8"
    try:
        said = await server.text(
            PROBES[0], {"max_tokens": 16, "structured_outputs": {"choice": [only]}}
        )
    except ServerRefusal:
        return False
    return said == only
