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
from consumer.config.warm_start import TinyModelConfig
from rolloutmq.config.config import Config


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
    if config.policy.model is None and not folder.is_dir():
        return _tiny(config.tiny_model)
    return read_shape(folder)


def read_shape(folder: Path) -> Shape:
    """Return the shape of a model folder; every file must be whole. Raises ModelError."""
    try:
        document = orjson.loads((folder / "config.json").read_bytes())
        files = [_parameters(file) for file in sorted(folder.glob("[!.]*.safetensors"))]
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{folder}: cannot be read as a model: {error}", hint="copy or download it again"
        ) from error
    named: dict[str, Any] = document.get("text_config", document)
    names = document.get("architectures") or [named.get("model_type", "unknown")]
    return _shape(str(names[0]), sum(files), named)


def _parameters(file: Path) -> int:
    with file.open("rb") as stream:
        header = read_header(stream)
    size = file.stat().st_size
    if size < header.file_bytes:
        raise ValueError(f"{file.name} has {size:,} of {header.file_bytes:,} bytes")
    return sum(prod(span.shape) for span in header.tensors.values())


def _shape(name: str, parameters: int, named: dict[str, Any]) -> Shape:
    try:
        width = int(named["hidden_size"])
        layers = int(named["num_hidden_layers"])
        heads = int(named["num_attention_heads"])
        vocabulary = int(named["vocab_size"])
    except (KeyError, TypeError) as error:
        raise ModelError(
            f"{name}: its config.json has no {error}, so its memory cannot be estimated"
        ) from error
    kv_heads = int(named.get("num_key_value_heads") or heads)
    head = int(named.get("head_dim") or width // heads)
    experts = int(named.get("num_experts") or named.get("num_local_experts") or 0)
    used = int(named.get("num_experts_per_tok") or 1)
    inner = int(named.get("moe_intermediate_size") or named.get("intermediate_size") or 4 * width)
    return Shape(
        name=name,
        parameters=parameters,
        embedding=vocabulary * width,
        layers=layers,
        width=width,
        intermediate=inner * (used if experts else 1),
        kv_values=2 * layers * kv_heads * head,
        positions=named.get("max_position_embeddings"),
    )


TINY_VOCABULARY = 128  # tokens of a tokenizer that is built here, about


def _tiny(spec: TinyModelConfig) -> Shape:
    vocabulary = max(TINY_VOCABULARY, spec.vocab_size or 0)
    attention = 2 * spec.hidden * spec.head_dim * (spec.heads + spec.kv_heads)
    layer = attention + 3 * spec.hidden * spec.intermediate
    return _shape(
        "a small model of Qwen3's architecture, which the run builds",
        vocabulary * spec.hidden + spec.layers * layer,
        {
            "hidden_size": spec.hidden,
            "num_hidden_layers": spec.layers,
            "num_attention_heads": spec.heads,
            "num_key_value_heads": spec.kv_heads,
            "head_dim": spec.head_dim,
            "intermediate_size": spec.intermediate,
            "vocab_size": vocabulary,
            "max_position_embeddings": spec.max_positions,
        },
    )


def context_tokens(config: Config) -> int | None:
    """Return the tokens that prompt and response share in the engine; None if unknown."""
    limits = [getattr(config.engine, "max_model_len", None)]
    with suppress(ModelError, HubError):  # reported where the model is checked
        limits.append(shape_of(config).positions)
    return min((limit for limit in limits if limit), default=None)
