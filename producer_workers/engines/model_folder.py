"""What a Hugging Face model folder holds, read from headers only: no tensor, no torch.

Invariant: a folder that passes here has complete safetensors files. A half-copied file is the usual
way for weights to be bad, and a loader that meets it in the middle of a running engine has already
overwritten half a model.

A LoRA adapter as PEFT writes it (adapter_config.json, adapter_model.safetensors): does it fit the
model?

Engines would take much of what does not: a loader that meets a layer it does not know passes it by,
or gives each forward pass a wrong product. So a folder is checked as a whole before an engine sees
it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

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

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "tekken.json",
    "tiktoken.model",
)

Shapes = Mapping[str, tuple[int, ...]]


def check_model_folder(folder: Path) -> None:
    """Raises EngineError where `folder` cannot be a model: what is missing, before an engine
    starts.
    """
    if not folder.is_dir():
        raise EngineError(
            f"no model folder at {folder}", hint="give a local folder; nothing is downloaded"
        )
    if not (folder / "config.json").is_file():
        raise EngineError(f"{folder} has no config.json", hint="is it a Hugging Face model folder?")
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise EngineError(f"{folder} has no tokenizer", hint="copy tokenizer.json to it")
    try:
        read_shapes(folder)
    except WeightsError as error:
        raise EngineError(error.message, hint=error.hint) from error


def read_shapes(folder: Path) -> Shapes:
    """Name and shape of every tensor in the safetensors files of `folder`. Raises WeightsError."""
    files = weight_files(folder)
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        shapes.update(_file_shapes(file))
    return shapes


def weight_files(folder: Path) -> list[Path]:
    """The files that make up one checkpoint. Raises WeightsError."""
    try:
        return safetensors_files.weight_files(folder)
    except ModelError as error:
        raise WeightsError(error.message, hint=error.hint) from error


def has_tied_head(folder: Path) -> bool:
    """Whether the model of `folder` shares its output head with its embeddings."""
    config = orjson.loads((folder / "config.json").read_bytes())
    return bool(config.get("tie_word_embeddings", False))


def check_same_tensors(old: Shapes, new: Shapes, folder: Path, *, tied_head: bool) -> None:
    """Raises WeightsError unless `new` can take the place of `old`, tensor by tensor.

    A loader would only warn of a missing tensor and keep the old one: half a policy. A tied output
    head may be stored or left out: writers differ.
    """
    optional = {"lm_head.weight"} if tied_head else set()
    if is_adapter(folder):
        hint = "set [engine] max_lora_rank (kind http: weights = 'adapters'), or leave out [learner.lora]"
        raise WeightsError(
            f"{folder} holds a LoRA adapter, and the engine samples with whole weights", hint=hint
        )
    missing = sorted(old.keys() - new.keys() - optional)
    unknown = sorted(new.keys() - old.keys() - optional)
    changed = sorted(name for name in old.keys() & new.keys() if old[name] != new[name])
    for names, what in (
        (missing, "lacks"),
        (unknown, "has unknown"),
        (changed, "has another shape of"),
    ):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise WeightsError(
                f"{folder} {what} {names[0]}{more}",
                hint="publish the model that the worker was started with",
            )


def _file_shapes(file: Path) -> dict[str, tuple[int, ...]]:
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            header = read_header(stream)
    except (OSError, ValueError) as error:
        raise WeightsError(
            f"{file} is not a valid safetensors file: {error}", hint="is the copy complete?"
        ) from error
    if size != header.file_bytes:
        raise WeightsError(
            f"{file} has {size} bytes, its header says {header.file_bytes}",
            hint="was it copied completely?",
        )
    return {name: span.shape for name, span in header.tensors.items()}


OTHER_KINDS = ("alpha_pattern", "modules_to_save", "use_dora")
"""What a config may ask for beside plain low-rank pairs, and vLLM passes by or refuses half-way."""


class AdapterCheck:
    """Whether adapters fit the model of `model_dir`. `most`: the largest rank, where the engine has
    one.
    """

    def __init__(self, model_dir: Path, shapes: Shapes, most: int | None = None) -> None:
        self._model_dir = model_dir
        self._shapes = shapes
        self._most = most

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
