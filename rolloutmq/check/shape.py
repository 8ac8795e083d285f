"""Read from a model folder what memory depends on, without loading the model."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import orjson

from buffer.errors import HubError, ModelError
from buffer.weights.safetensors_files import read_header
from rolloutmq.config.config import Config

TINY_VOCABULARY = 128  # tokens of a tokenizer that is built here, about


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a model, in parameters.

    `kv_values`: numbers per token in the KV cache. `positions`: tokens that the model can read.
    """

    name: str
    parameters: int
    embedding: int
    layers: int
    width: int
    intermediate: int
    kv_values: int
    positions: int | None

    @property
    def vocabulary(self) -> int:
        return self.embedding // self.width


def shape_of(config: Config) -> Shape:
    """Return the shape of a run's model. Raises ModelError, and HubError if it is not here."""
    folder = config.model_folder
    if config.policy.model is not None or folder.is_dir():
        return read_shape(folder)
    tiny = config.tiny_model
    vocabulary = max(TINY_VOCABULARY, tiny.vocab_size or 0)
    attention = 2 * tiny.hidden * tiny.head_dim * (tiny.heads + tiny.kv_heads)
    layer = attention + 3 * tiny.hidden * tiny.intermediate
    return Shape(
        name="a small model of Qwen3's architecture, which the run builds",
        parameters=vocabulary * tiny.hidden + tiny.layers * layer,
        embedding=vocabulary * tiny.hidden,
        layers=tiny.layers,
        width=tiny.hidden,
        intermediate=tiny.intermediate,
        kv_values=2 * tiny.layers * tiny.kv_heads * tiny.head_dim,
        positions=tiny.max_positions,
    )


def read_shape(folder: Path) -> Shape:
    """Return the shape of a model folder; every file must be whole. Raises ModelError."""
    try:
        document = orjson.loads((folder / "config.json").read_bytes())
        parameters = 0
        for file in sorted(folder.glob("[!.]*.safetensors")):
            with file.open("rb") as stream:
                header = read_header(stream)
            if (size := file.stat().st_size) < header.file_bytes:
                raise ValueError(f"{file.name} has {size:,} of {header.file_bytes:,} bytes")
            parameters += sum(prod(span.shape) for span in header.tensors.values())
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{folder}: cannot be read as a model: {error}", hint="copy or download it again"
        ) from error
    named: dict[str, Any] = document.get("text_config", document)
    names = document.get("architectures") or [named.get("model_type", "unknown")]
    return _shape(str(names[0]), parameters, named)


def _shape(name: str, parameters: int, named: dict[str, Any]) -> Shape:
    try:
        width, layers, heads, vocabulary = (
            int(named[key])
            for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
        )
    except (KeyError, TypeError) as error:
        raise ModelError(
            f"{name}: its config.json has no {error}, so its memory cannot be estimated"
        ) from error
    head = int(named.get("head_dim") or width // heads)
    inner = int(named.get("moe_intermediate_size") or named.get("intermediate_size") or 4 * width)
    if named.get("num_experts") or named.get("num_local_experts"):
        inner *= int(named.get("num_experts_per_tok") or 1)
    return Shape(
        name=name,
        parameters=parameters,
        embedding=vocabulary * width,
        layers=layers,
        width=width,
        intermediate=inner,
        kv_values=2 * layers * int(named.get("num_key_value_heads") or heads) * head,
        positions=named.get("max_position_embeddings"),
    )


def context_tokens(config: Config) -> int | None:
    """Return the tokens that prompt and response share in the engine; None if unknown."""
    limits = [getattr(config.engine, "max_model_len", None)]
    with suppress(ModelError, HubError):  # reported where the model is checked
        limits.append(shape_of(config).positions)
    return min((limit for limit in limits if limit), default=None)
