"""Estimate (not measure) the GPU memory of trainer and engines; see docs/pages/many_gpus.md."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from buffer.config.memory_budget import PROMPT_TOKENS
from buffer.errors import HubError, ModelError
from buffer.readable import format_size
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
            short[_less(config)] = "error" if kept > gpu_bytes else "warning"
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
    logits = LOGIT_BYTES * tokens * shape.embedding // shape.width
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
