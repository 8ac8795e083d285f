"""A LoRA adapter as PEFT writes it (adapter_config.json, adapter_model.safetensors): does it fit the model?

Engines would take much of what does not: a loader that meets a layer it does not know passes it by, or gives each
forward pass a wrong product. So a folder is checked as a whole before an engine sees it.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

import orjson

from buffer.errors import ModelError
from buffer.weights.safetensors_files import (
    ADAPTER_CONFIG,
    ADAPTER_TENSORS,
    BASE_CHECKSUM,
    PEFT_PREFIX,
    model_checksum,
    read_header,
)
from producer_workers.engines.base import WeightsError
from producer_workers.engines.model_folder import Shapes, read_shapes

OTHER_KINDS = ("alpha_pattern", "modules_to_save", "use_dora")
"""What a config may ask for beside plain low-rank pairs, and vLLM passes by or refuses half-way."""


class AdapterCheck:
    """Whether adapters fit the model of `model_dir`. `most`: the largest rank, where the engine has one."""

    def __init__(self, model_dir: Path, shapes: Shapes, most: int | None = None) -> None:
        self._model_dir, self._shapes, self._most = model_dir, shapes, most

    def check(self, folder: Path) -> None:
        """Raises WeightsError unless `folder` holds a whole adapter that fits. Reads headers alone."""
        rank = self._rank(folder)
        for name, shape in read_shapes(folder).items():
            if shape != self._expected(name, rank):
                hint = "publish lora_A and lora_B of the model that the worker was started with, and nothing else"
                raise WeightsError(
                    f"{folder} does not fit the model: {name} is {list(shape)}", hint=hint
                )
        self._check_base(folder)

    def _check_base(self, folder: Path) -> None:
        try:
            with (folder / ADAPTER_TENSORS).open("rb") as stream:
                base = read_header(stream).metadata.get(BASE_CHECKSUM)
            mine = self._checksum if base else base  # an adapter that others made does not say
        except (OSError, ValueError, ModelError) as error:
            raise WeightsError(f"{folder} does not say for which model it is: {error}") from error
        if base != mine:
            raise WeightsError(
                f"{folder} is an adapter for another model: for weights {base}, {self._model_dir} has {mine}",
                hint="start worker and trainer with the same model folder ([policy] model)",
            )

    def _rank(self, folder: Path) -> int:
        try:
            config = orjson.loads((folder / ADAPTER_CONFIG).read_bytes())
            rank = config["r"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            hint = "[engine] max_lora_rank is set: publish adapters; without it, whole weights"
            raise WeightsError(f"{folder} holds no LoRA adapter: {error!r}", hint=hint) from error
        if not isinstance(rank, int) or not 0 < rank <= (self._most or rank):
            raise WeightsError(
                f"{folder} is an adapter of rank {rank}",
                hint=f"[engine] max_lora_rank is {self._most}",
            )
        if others := [name for name in OTHER_KINDS if config.get(name)]:
            raise WeightsError(f"{folder} is no plain LoRA adapter: it has {', '.join(others)}")
        return rank

    def _expected(self, name: str, rank: int) -> tuple[int, ...] | None:
        """The shape of a tensor of an adapter; None for one that has no place here."""
        layer, _, side = name.removeprefix(PEFT_PREFIX).removesuffix(".weight").rpartition(".lora_")
        weight = self._shapes.get(f"{layer}.weight", ())
        if len(weight) != 2 or side not in ("A", "B"):
            return None
        return (rank, weight[1]) if side == "A" else (weight[0], rank)

    @cached_property
    def _checksum(self) -> str:
        return model_checksum(self._model_dir)
