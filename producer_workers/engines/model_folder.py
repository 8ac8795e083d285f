"""Check model folders and LoRA adapters by their headers alone, without tensors or torch.

A loader that meets a half-copied file has already overwritten half of a running model, so an engine
reads only folders that passed.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import orjson

from buffer.errors import ModelError
from buffer.weights import safetensors_files
from buffer.weights.safetensors_files import (
    ADAPTER_CONFIG,
    ADAPTER_TENSORS,
    BASE_CHECKSUM,
    PEFT_PREFIX,
    is_adapter,
    model_checksum,
    read_header,
)
from producer_workers.engines.base import EngineError, WeightsError

TOKENIZER_FILES = [
    "tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json", "tiktoken.model",
]  # fmt: skip
# settings of adapters that vLLM ignores, or refuses half-way
OTHER_KINDS = ("alpha_pattern", "modules_to_save", "use_dora")

Shapes = Mapping[str, tuple[int, ...]]


def check_model_folder(folder: Path) -> None:
    """Raise EngineError, naming what is missing, unless `folder` can be a model."""
    if not folder.is_dir():
        raise EngineError(
            f"no model folder at {folder}", hint="give a local folder; nothing is downloaded"
        )
    if not (folder / "config.json").is_file():
        raise EngineError(f"{folder} has no config.json", hint="give a Hugging Face model folder")
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise EngineError(f"{folder} has no tokenizer", hint="copy tokenizer.json to it")
    try:
        read_shapes(folder)
    except WeightsError as error:
        raise EngineError(error.message, hint=error.hint) from error


def read_shapes(folder: Path) -> Shapes:
    """Return the shape of each tensor in the safetensors files. Raises WeightsError."""
    try:
        files = safetensors_files.weight_files(folder)
    except ModelError as error:
        raise WeightsError(error.message, hint=error.hint) from error
    return {name: shape for file in files for name, shape in _file_shapes(file).items()}


def has_tied_head(folder: Path) -> bool:
    return bool(read_config(folder).get("tie_word_embeddings", False))


def check_same_tensors(old: Shapes, new: Shapes, folder: Path, *, tied_head: bool) -> None:
    """Raise WeightsError unless `new` can replace `old`. It may lack a tied output head."""
    optional = {"lm_head.weight"} if tied_head else set()
    if is_adapter(folder):
        hint = (
            "set [engine] max_lora_rank (kind http: weights = 'adapters'), "
            "or leave out [learner.lora]"
        )
        raise WeightsError(
            f"{folder} holds a LoRA adapter, and the engine samples with whole weights", hint=hint
        )
    differences = {
        "lacks": old.keys() - new.keys() - optional,
        "has unknown": new.keys() - old.keys() - optional,
        "has another shape of": {name for name in old.keys() & new if old[name] != new[name]},
    }
    for what, names in differences.items():
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise WeightsError(
                f"{folder} {what} {min(names)}{more}",
                hint="publish the model that the worker was started with",
            )


class ModelCheck:
    """Checks headers of whole weights against a model, whose own files it reads (WeightsError)."""

    def __init__(self, model_dir: Path) -> None:
        self.shapes = read_shapes(model_dir)
        self._tied_head = has_tied_head(model_dir)

    def check(self, folder: Path) -> None:
        """Raise WeightsError unless `folder` holds the same tensors."""
        check_same_tensors(self.shapes, read_shapes(folder), folder, tied_head=self._tied_head)


def _file_shapes(file: Path) -> dict[str, tuple[int, ...]]:
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            header = read_header(stream)
    except (OSError, ValueError) as error:
        raise WeightsError(
            f"{file} is not a valid safetensors file: {error}",
            hint="check that it was copied completely",
        ) from error
    if size != header.file_bytes:
        raise WeightsError(
            f"{file} has {size} bytes, but {header.file_bytes} by its header",
            hint="check that it was copied completely",
        )
    return {name: span.shape for name, span in header.tensors.items()}


class AdapterCheck:
    """Checks headers of LoRA adapters against a model; `most`: the largest rank, if limited."""

    def __init__(self, model_dir: Path, shapes: Shapes, most: int | None = None) -> None:
        self._model_dir = model_dir
        self._shapes = shapes
        self._most = most

    def check(self, folder: Path) -> None:
        """Raise WeightsError unless `folder` holds a complete adapter that fits."""
        rank = self._rank(folder)
        for name, shape in read_shapes(folder).items():
            if shape != self._expected(name, rank):
                hint = (
                    "publish lora_A and lora_B of the model that the worker was started with, "
                    "and nothing else"
                )
                raise WeightsError(
                    f"{folder} does not fit the model: {name} is {list(shape)}", hint=hint
                )
        self._check_base(folder)

    def _check_base(self, folder: Path) -> None:
        try:
            with (folder / ADAPTER_TENSORS).open("rb") as stream:
                base = read_header(stream).metadata.get(BASE_CHECKSUM)
            # Adapters made by other programs do not name their base model.
            mine = self._checksum if base else base
        except (OSError, ValueError, ModelError) as error:
            raise WeightsError(f"{folder} does not name its base model: {error}") from error
        if base != mine:
            raise WeightsError(
                f"{folder} is an adapter for another model: its base has checksum {base}, "
                f"{self._model_dir} has {mine}",
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
            raise WeightsError(f"{folder} is not a plain LoRA adapter: it has {', '.join(others)}")
        return rank

    def _expected(self, name: str, rank: int) -> tuple[int, ...] | None:
        """Return the shape that an adapter's tensor must have; None if it must not exist."""
        layer, _, side = name.removeprefix(PEFT_PREFIX).removesuffix(".weight").rpartition(".lora_")
        weight = self._shapes.get(f"{layer}.weight", ())
        if len(weight) != 2 or side not in ("A", "B"):
            return None
        return (rank, weight[1]) if side == "A" else (weight[0], rank)

    @cached_property
    def _checksum(self) -> str:
        return model_checksum(self._model_dir)


def eos_ids(folder: Path) -> set[int]:
    """Return a model's end-of-text ids, from its generation config or its config."""
    for name in ("generation_config.json", "config.json"):
        eos = read_config(folder, name).get("eos_token_id")
        if eos is not None:
            return set(eos) if isinstance(eos, list) else {int(eos)}
    return set()


def vocabulary_size(folder: Path) -> int | None:
    config = read_config(folder)
    size = config.get("text_config", config).get("vocab_size")
    return None if size is None else int(size)


def read_config(folder: Path, name: str = "config.json") -> dict[str, Any]:
    """Return the JSON object in a file of a model folder; {} without the file."""
    file = folder / name
    return dict(orjson.loads(file.read_bytes())) if file.is_file() else {}
