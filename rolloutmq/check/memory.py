"""Estimate (not measure) the GPU memory of trainer and engines; see docs/pages/many_gpus.md."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass

from buffer.config.memory_budget import PROMPT_TOKENS
from buffer.errors import HubError, ModelError
from buffer.readable import format_size
from consumer.config.learner import LearnerConfig
from producer_workers.config.engine import GpuMemory
from rolloutmq.check.finding import Finding, Level
from rolloutmq.check.machine import engines_of_judges
from rolloutmq.check.shape import Shape, context_tokens, read_shape
from rolloutmq.config.config import Config

GIB = 1 << 30
# the most that logits take: the vocabulary projection is computed in chunks
LOGITS = int(1.2 * GIB)
LOGIT_BYTES = 20  # bytes of a logit: several copies in float32
FULL = 0.9  # share of a GPU's memory that may be planned; the rest is for fragments and buffers
UTILIZATION = 0.9  # share of a GPU's memory that vLLM takes by default
ENGINE_ROOM = 2 * GIB  # activations and CUDA graphs of an engine, about


@dataclass(frozen=True, slots=True)
class Parts:
    """Bytes on one GPU of the trainer."""

    states: int
    copy: int
    projection: int
    activations: int

    @property
    def total(self) -> int:
        return self.states + self.copy + self.projection + self.activations


def memory_findings(config: Config, shape: Shape, gpu_bytes: int | None) -> Iterator[Finding]:
    """Yield the memory of trainer and engine, and whether it fits into GPUs of `gpu_bytes`."""
    trainer = engine = 0
    if config.trainer.loop is None:
        parts = trainer_parts(config, shape)
        trainer = parts.total
        yield _trainer(config, parts, gpu_bytes)
    if kept := config.engine.gpu_memory:
        engine = yield from _engine(config, kept, shape, gpu_bytes)
    judges = yield from _judges(config, shape, gpu_bytes)
    if judges and gpu_bytes and engine + judges > gpu_bytes:
        yield Finding(
            "memory",
            "error",
            "the engines of a worker share its GPUs, and need "
            f"{format_size(engine + judges)} of {format_size(gpu_bytes)}",
            "set gpu_memory_utilization of [engine] and of each other engine, so that they sum to "
            f"{UTILIZATION:g} at most, or use a server (kind http)",
        )
    engine += judges
    together = trainer + engine
    if config.launch.colocated and gpu_bytes and together > FULL * gpu_bytes:
        yield Finding(
            "memory",
            "warning",
            f"trainer and engine share a GPU and need {format_size(together)} of "
            f"{format_size(gpu_bytes)} where neither sleeps",
            "set [trainer] flow = colocated and [worker] sleep_when_paused, or use smaller sizes",
        )


# -- the trainer ----------------------------------------------------------------------------------


def trainer_parts(config: Config, shape: Shape) -> Parts:
    """Return the bytes that one rank of the reference trainer holds on its GPU."""
    learner = config.learner
    ranks = config.launch.ranks(has_own_loop=False)
    layer = (shape.parameters - shape.embedding) // shape.layers
    width = 2 if learner.bf16 else 4
    if learner.lora:
        adapter = _adapter(learner, shape)
        states = width * shape.parameters // ranks + 16 * adapter
        copy = 0
    else:
        each = 10 if learner.optimizer == "adamw_8bit" else 16
        states = each * shape.parameters // ranks
        # several ranks gather a layer at a time, with its gradient
        gathered = shape.parameters if ranks == 1 else 3 * (shape.embedding + layer)
        copy = 2 * gathered if learner.bf16 else 0
    if learner.loss.has_own_reference and not learner.lora:
        states += 4 * shape.parameters // ranks
    if config.trainer.is_gae:
        states *= 2
    if learner.sharding.cpu_offload:
        states = 0
    logits = LOGIT_BYTES * _tokens_of_a_pass(config) * shape.embedding // shape.width
    projection = (width + 4) * shape.embedding + min(LOGITS, logits)
    return Parts(states, copy, projection, _activations(config, shape, width))


def longest_sample(config: Config) -> int:
    """Return the tokens of the longest prompt with its longest response."""
    prompt = config.producer.max_prompt_tokens or PROMPT_TOKENS
    longest = prompt + max(config.tasks[name].sample.max_tokens for name in config.training_tasks)
    limits = [longest, context_tokens(config), config.trainer.max_sequence_tokens]
    return min(limit for limit in limits if limit)


def _tokens_of_a_pass(config: Config) -> int:
    # a sample that is longer than the budget is a pass of its own
    return max(config.learner.token_budget, longest_sample(config))


def _adapter(learner: LearnerConfig, shape: Shape) -> int:
    assert learner.lora is not None
    outputs = {"gate_proj": shape.intermediate, "up_proj": shape.intermediate}
    inputs = {"down_proj": shape.intermediate}
    sizes = (
        inputs.get(name, shape.width) + outputs.get(name, shape.width)
        for name in learner.lora.target_modules
    )
    return shape.layers * learner.lora.rank * sum(sizes)


def _activations(config: Config, shape: Shape, width: int) -> int:
    inside = 40 * shape.width + 16 * shape.intermediate
    layers = shape.layers if not config.learner.gradient_checkpointing else 1
    kept = 4 * shape.layers * shape.width
    return _tokens_of_a_pass(config) * (kept + layers * inside) * width // 2


def _trainer(config: Config, parts: Parts, gpu_bytes: int | None) -> Finding:
    ranks = config.launch.ranks(has_own_loop=False)
    tokens = _tokens_of_a_pass(config)
    what = (
        f"trainer: {format_size(parts.total)} {_devices(ranks)} (weights, "
        f"gradients and optimizer {format_size(parts.states + parts.copy)}, vocabulary "
        f"{format_size(parts.projection)}, activations of {tokens:,} tokens "
        f"{format_size(parts.activations)})"
    )
    if gpu_bytes is None or parts.total <= FULL * gpu_bytes:
        return Finding("memory", "ok", what)
    level: Level = "error" if parts.states + parts.copy > gpu_bytes else "warning"
    return Finding("memory", level, f"{what}; a GPU has {format_size(gpu_bytes)}", _less(config))


def _devices(ranks: int) -> str:
    return "on one device" if ranks == 1 else f"on each of {ranks} devices"


def _less(config: Config) -> str:
    """Return how to reduce the trainer's memory: the next step of docs/pages/many_gpus.md."""
    learner = config.learner
    if not learner.gradient_checkpointing:
        return "set [learner] gradient_checkpointing = true"
    if learner.token_budget > longest_sample(config):
        return f"lower [learner] token_budget to {longest_sample(config)}"
    return (
        "use more trainer_gpus, [learner.sharding] cpu_offload = true, or [learner.lora]; "
        "see docs/pages/many_gpus.md"
    )


def _judges(config: Config, shape: Shape, gpu_bytes: int | None) -> Generator[Finding, None, int]:
    """Yield the memory of the engines of attached judges; return the bytes on one GPU."""
    total = 0
    for name, own in engines_of_judges(config).items():
        if kept := own.settings.gpu_memory:
            with suppress(ModelError, HubError):  # the stage of the model reports it
                folder = own.folder()
                size = shape if folder == config.model_folder else read_shape(folder)
                total += yield from _engine(config, kept, size, gpu_bytes, name)
    return total


# -- the engine -----------------------------------------------------------------------------------


def _engine(
    config: Config, kept: GpuMemory, shape: Shape, gpu_bytes: int | None, who: str = "engine"
) -> Generator[Finding, None, int]:
    """Yield the memory of an engine; return the bytes on one of its GPUs."""
    weights = kept.value_bytes * shape.parameters // kept.parts
    tokens = longest_sample(config)
    sequence = tokens * (kept.value_bytes * shape.kv_values // kept.parts)
    what = f"{who}: weights {format_size(weights)} on each device"
    one = f"{format_size(sequence)} for a sequence of {tokens:,} tokens"
    cache = kept.cache_bytes
    if cache is None and gpu_bytes:
        cache = int((kept.share or UTILIZATION) * gpu_bytes) - weights - ENGINE_ROOM
    if cache is None:
        yield Finding("memory", "ok", f"{what}, KV cache {one}")
        return weights + ENGINE_ROOM
    if cache < sequence or (gpu_bytes and weights + cache > gpu_bytes):
        has = f"; a GPU has {format_size(gpu_bytes)}" if gpu_bytes else ""
        yield Finding(
            "memory",
            "error",
            f"{what}, KV cache {format_size(max(0, cache))}, which must hold {one}{has}",
            "set [engine] tensor_parallel_size, gpu_memory_utilization or kv_cache_memory_bytes, "
            "or a smaller max_model_len",
        )
    else:
        room = f"room for {cache // sequence:,} sequences of {tokens:,} tokens"
        yield Finding("memory", "ok", f"{what}, KV cache {format_size(cache)}, {room}")
    return weights + max(0, cache) + ENGINE_ROOM
