"""Sample with one LoRA adapter, at first of zeros; running requests continue under a newer one."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import orjson
from safetensors.numpy import save_file

from buffer.weights.safetensors_files import ADAPTER_CONFIG, ADAPTER_TENSORS, PEFT_PREFIX
from producer_workers.engines.base import EngineError
from producer_workers.engines.model_folder import AdapterCheck, Shapes

NAME = "policy"
NUMBER = 1
ZEROED = "q_proj"  # the layer of the adapter of zeros


class VllmAdapter(AdapterCheck):
    """The adapters of one engine, up to rank `most`. Raises EngineError without a `q_proj`."""

    def __init__(self, model_dir: Path, shapes: Shapes, most: int) -> None:
        super().__init__(model_dir, shapes, most)
        self._scratch = TemporaryDirectory(prefix="rolloutmq-adapter-")
        self.first = Path(self._scratch.name)
        _write_zeros(self.first, shapes)

    def arguments(self) -> dict[str, Any]:
        return {"enable_lora": True, "max_lora_rank": self._most, "max_loras": 1}

    def request(self, folder: Path) -> Any:
        """Return the LoRARequest that each request carries."""
        return import_module("vllm.lora.request").LoRARequest(NAME, NUMBER, str(folder.resolve()))

    def loading(self, folder: str) -> tuple[str, str, int, str]:
        """Return the `WeightLoader` call that replaces the adapter with the one in `folder`."""
        return "rolloutmq_load_adapter", NAME, NUMBER, folder

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
