"""Read a model's sizes from its folder, and estimate (not measure) the GPU memory of a run.

docs/pages/many_gpus.md has the formula.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import orjson

from buffer.config.memory_budget import PROMPT_TOKENS
from buffer.errors import HubError, ModelError
from buffer.readable import format_size
from buffer.weights.safetensors_files import read_header
from producer_workers.config.engine import GpuMemory
from rolloutmq.check.finding import Finding, Level
from rolloutmq.check.machine import engines_of_judges
from rolloutmq.config.config import Config

GIB = 1 << 30
# the most that logits take: the vocabulary projection is computed in chunks
LOGITS = int(1.2 * GIB)
FULL = 0.9  # share of a GPU's memory that may be planned; the rest is for fragments and buffers
UTILIZATION = 0.9  # share of a GPU's memory that vLLM takes by default
ENGINE_ROOM = 2 * GIB  # activations and CUDA graphs of an engine, about


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
    vocabulary = max(128, tiny.vocab_size or 0)  # tokens of a tokenizer that is built here, about
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
    name = str((document.get("architectures") or [named.get("model_type", "unknown")])[0])
    try:
        width, layers, heads, vocabulary = (
            int(named[key])
            for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
        )
    except (KeyError, TypeError) as error:
        raise ModelError(
            f"{name}: its config.json has no {error}, so its memory cannot be estimated"
        ) from error
    inner = int(named.get("moe_intermediate_size") or named.get("intermediate_size") or 4 * width)
    if named.get("num_experts") or named.get("num_local_experts"):
        inner *= int(named.get("num_experts_per_tok") or 1)
    head = int(named.get("head_dim") or width // heads)
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


def memory_findings(config: Config, shape: Shape, gpu_bytes: int | None) -> Iterator[Finding]:
    """Yield one sentence on the memory of trainer and engines, and what to do where it is short."""
    said: list[str] = []
    short: dict[str, Level] = {}
    together = 0
    if config.trainer.loop is None:
        kept, activations = trainer_bytes(config, shape)
        together = kept + activations
        said.append(
            f"trainer {format_size(together)} on each device ({format_size(activations)} of it for "
            f"activations of {_tokens_of_a_pass(config):,} tokens)"
        )
        if gpu_bytes and together > FULL * gpu_bytes:
            short["lower what the trainer needs: docs/pages/many_gpus.md has the steps"] = (
                "error" if kept > gpu_bytes else "warning"
            )
    on_worker = []
    for who, memory, size in _engines(config, shape):
        what, held, is_short = _engine(memory, size, longest_sample(config), gpu_bytes)
        said.append(f"{who} {what}")
        on_worker.append(held)
        if is_short:
            fix = "set [engine] tensor_parallel_size, gpu_memory_utilization or "
            short[f"{fix}kv_cache_memory_bytes, or a smaller max_model_len"] = "error"
    together += sum(on_worker)
    if gpu_bytes:
        said.append(f"a GPU has {format_size(gpu_bytes)}")
        if len(on_worker) > 1 and sum(on_worker) > gpu_bytes:
            said.append(f"the engines of a worker share it and need {format_size(sum(on_worker))}")
            short[
                "let gpu_memory_utilization of [engine] and of each other engine sum to "
                f"{UTILIZATION:g} at most, or use a server (kind http)"
            ] = "error"
        if config.launch.colocated and together > FULL * gpu_bytes:
            said.append(
                f"trainer and engine share it and need {format_size(together)} where neither sleeps"
            )
            short["set [trainer] flow = colocated and [worker] sleep_when_paused"] = "warning"
    level: Level = min(short.values(), default="ok")  # by the alphabet, an error is first
    if said:
        yield Finding("memory", level, "; ".join(said), "; ".join(short))


def _engines(config: Config, shape: Shape) -> Iterator[tuple[str, GpuMemory, Shape]]:
    """Yield the engines whose memory is known, with the sizes of their models."""
    if memory := config.engine.gpu_memory:
        yield "engine", memory, shape
    for name, own in engines_of_judges(config).items():
        if memory := own.settings.gpu_memory:
            with suppress(ModelError, HubError):  # the stage of the model reports it
                folder = own.folder()
                yield name, memory, shape if folder == config.model_folder else read_shape(folder)


def _engine(
    memory: GpuMemory, shape: Shape, tokens: int, gpu_bytes: int | None
) -> tuple[str, int, bool]:
    """Return what an engine needs as text and in bytes, and whether that is too much."""
    weights = memory.value_bytes * shape.parameters // memory.parts
    sequence = tokens * (memory.value_bytes * shape.kv_values // memory.parts)
    what = f"{format_size(weights)} on each device, {format_size(sequence)} for each sequence of "
    what += f"{tokens:,} tokens"
    cache = memory.cache_bytes
    if cache is None and gpu_bytes:
        cache = int((memory.share or UTILIZATION) * gpu_bytes) - weights - ENGINE_ROOM
    if cache is None:
        return what, weights + ENGINE_ROOM, False
    is_short = cache < sequence or (gpu_bytes is not None and weights + cache > gpu_bytes)
    what += f", and a KV cache for {max(0, cache) // sequence:,} of them"
    return what, weights + max(0, cache) + ENGINE_ROOM, is_short


def trainer_bytes(config: Config, shape: Shape) -> tuple[int, int]:
    """Return the bytes that stay on each GPU of the reference trainer, and of activations."""
    learner = config.learner
    ranks = config.launch.ranks(has_own_loop=False)
    layer = (shape.parameters - shape.embedding) // shape.layers
    width = 2 if learner.bf16 else 4
    copy = 0
    if lora := learner.lora:
        outer = {"gate_proj": shape.intermediate, "up_proj": shape.intermediate}
        inner = {"down_proj": shape.intermediate}
        sizes = (
            inner.get(name, shape.width) + outer.get(name, shape.width)
            for name in lora.target_modules
        )
        adapter = shape.layers * lora.rank * sum(sizes)
        states = width * shape.parameters // ranks + 16 * adapter
    else:
        each = 10 if learner.optimizer == "adamw_8bit" else 16
        states = each * shape.parameters // ranks
        # several ranks gather a layer at a time, with its gradient
        gathered = shape.parameters if ranks == 1 else 3 * (shape.embedding + layer)
        copy = 2 * gathered if learner.bf16 else 0
        if learner.loss.has_own_reference:
            states += 4 * shape.parameters // ranks
    if config.trainer.is_gae:
        states *= 2
    if learner.sharding.cpu_offload:
        states = 0
    tokens = _tokens_of_a_pass(config)
    logits = 20 * tokens * shape.embedding // shape.width  # several copies in float32
    projection = (width + 4) * shape.embedding + min(LOGITS, logits)
    inside = 40 * shape.width + 16 * shape.intermediate
    layers = shape.layers if not learner.gradient_checkpointing else 1
    activations = tokens * (4 * shape.layers * shape.width + layers * inside) * width // 2
    return states + copy + projection, activations


def longest_sample(config: Config) -> int:
    """Return the tokens of the longest prompt with its longest response."""
    prompt = config.producer.max_prompt_tokens or PROMPT_TOKENS
    longest = prompt + max(config.tasks[name].sample.max_tokens for name in config.training_tasks)
    limits = [longest, context_tokens(config), config.trainer.max_sequence_tokens]
    return min(limit for limit in limits if limit)


def _tokens_of_a_pass(config: Config) -> int:
    # a sample that is longer than the budget is a pass of its own
    return max(config.learner.token_budget, longest_sample(config))
