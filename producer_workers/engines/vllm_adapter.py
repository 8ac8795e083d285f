"""Sampling with a LoRA adapter over the model that the engine started with: only the adapter is published.

The engine has one adapter at all times, at first one of zeros; a newer one takes its place. So a request goes on under
the newer one, as it does with whole weights. Files as PEFT writes them: adapter_config.json, adapter_model.safetensors.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import orjson
from safetensors.numpy import save_file

from producer_workers.engines.base import EngineError, WeightsError
from producer_workers.engines.model_folder import Shapes, read_shapes

NAME, NUMBER = "policy", 1
STEM = "base_model.model."
"""What PEFT puts before the name of a layer."""

ZEROED = "q_proj"
"""The layer that the adapter of zeros is made for."""


class VllmAdapter:
    """Of one engine. `shapes`: of its model; `most`: the largest rank. Raises EngineError where it has no `q_proj`."""

    def __init__(self, shapes: Shapes, most: int) -> None:
        self._shapes, self._most = shapes, most
        self._scratch = TemporaryDirectory(prefix="rolloutmq-adapter-")
        self.first = Path(self._scratch.name)
        _write_zeros(self.first, shapes)

    def arguments(self) -> dict[str, Any]:
        """What the engine must be started with."""
        return {"enable_lora": True, "max_lora_rank": self._most, "max_loras": 1}

    def request(self, folder: Path, *, replaces: bool = False) -> Any:
        """vLLM's name for the adapter; `replaces`: the one from `folder` comes in place of the one that is there."""
        kind = import_module("vllm.lora.request").LoRARequest
        return kind(NAME, NUMBER, str(folder.resolve()), load_inplace=replaces)

    def check(self, folder: Path) -> None:
        """Raises WeightsError unless `folder` holds a whole adapter that fits."""
        try:
            rank = orjson.loads((folder / "adapter_config.json").read_bytes())["r"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            hint = "[engine] max_lora_rank is set: publish adapters; without it, whole weights"
            raise WeightsError(f"{folder} holds no LoRA adapter: {error!r}", hint=hint) from error
        if not isinstance(rank, int) or not 0 < rank <= self._most:
            raise WeightsError(f"{folder} is an adapter of rank {rank}", hint=f"[engine] max_lora_rank is {self._most}")
        for name, shape in read_shapes(folder).items():
            if shape != self._expected(name, rank):
                hint = "publish lora_A and lora_B of the model that the worker was started with, and nothing else"
                raise WeightsError(f"{folder} does not fit the model: {name} is {list(shape)}", hint=hint)

    def _expected(self, name: str, rank: int) -> tuple[int, ...] | None:
        """The shape of a tensor of an adapter; None for one that has no place here. vLLM would take any."""
        layer, _, side = name.removeprefix(STEM).removesuffix(".weight").rpartition(".lora_")
        weight = self._shapes.get(f"{layer}.weight", ())
        if len(weight) != 2 or side not in ("A", "B"):
            return None
        return (rank, weight[1]) if side == "A" else (weight[0], rank)

    def close(self) -> None:
        self._scratch.cleanup()


def _write_zeros(folder: Path, shapes: Shapes) -> None:
    name = next((name for name in sorted(shapes) if name.endswith(f".{ZEROED}.weight")), None)
    if name is None:
        raise EngineError(f"the model has no {ZEROED}, with which an adapter begins", hint="unset max_lora_rank")
    out, into = shapes[name]
    stem = STEM + name.removesuffix(".weight")
    zeros = {
        f"{stem}.lora_A.weight": np.zeros((8, into), "<f4"),
        f"{stem}.lora_B.weight": np.zeros((out, 8), "<f4"),
    }
    save_file(zeros, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 8, "lora_alpha": 8, "target_modules": [ZEROED]}
    (folder / "adapter_config.json").write_bytes(orjson.dumps(config | {"bias": "none"}))
