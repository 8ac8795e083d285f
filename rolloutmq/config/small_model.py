"""The model of a run without [policy] model: [tiny_model] builds it, [warm_start] trains it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Protocol

from pydantic import Field

from buffer.config.section import Count, FromList, Section
from buffer.imports import attached, load_object


class TinyModelConfig(Section):
    """[tiny_model]: the architecture of the model that is built locally."""

    hidden: int = Field(128, ge=32, le=65_536)
    """width of the residual stream"""
    layers: int = Field(2, ge=1, le=1024)
    """number of transformer blocks"""
    heads: int = Field(4, ge=1, le=1024)
    """attention heads, a multiple of kv_heads"""
    kv_heads: int = Field(4, ge=1, le=1024)
    """heads of keys and values"""
    head_dim: int = Field(32, ge=8, le=1024, multiple_of=8)
    """width of a head; vLLM's attention on a CPU supports 32, 64, 80, 96, 112, 128 and 256"""
    intermediate: int = Field(384, ge=8, le=1_000_000)
    """width of the feed-forward layers"""
    vocab_size: int | None = Field(None, ge=1, le=10_000_000)
    """rows of the embedding, to get the shape of a larger model; default: the tokenizer's tokens"""
    max_positions: int = Field(256, ge=16, le=10_000_000)
    """largest number of tokens of prompt and answer"""
    init_std: float = Field(0.08, gt=0, le=10)
    """standard deviation of the random weights; with the usual 0.02 narrow models learn slowly at
    first
    """
    phrases: Annotated[tuple[str, ...], FromList] = (
        "State the final answer to the following arithmetic problem: ",
        " + ",
        " - ",
        " =",
    )
    """pieces of text that become one token each; the defaults fit reasoning-gym's chain_sum"""

    def problems(self) -> Iterator[str]:
        if self.heads % self.kv_heads:
            yield f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})"


class WarmStartConfig(Section):
    """[warm_start]: supervised training of that model before GRPO."""

    path: Path | None = None
    """a JSONL file of solved problems ("question" and "answer"); default: those that reasoning_gym
    data sets reserve by warm_start_size
    """
    max_steps: Count = Field(2000, ge=0)
    """stop after this many steps even if the accuracy is lower; 0: keep the random weights"""
    stop_accuracy: float = Field(0.48, ge=0, le=1)
    """stop when the greedy accuracy on the development problems reaches this"""
    check_every_steps: Count = Field(25, ge=1)
    """steps between two measurements of that accuracy"""
    development_problems: Count = Field(300, ge=1)
    """number of held-out problems, from the end of the file; never trained on"""
    batch_size: int = Field(32, ge=1, le=1_000_000)
    """problems per step"""
    learning_rate: float = Field(3e-3, gt=0, le=10)
    """step size of AdamW"""
    warmup_steps: Count = Field(30, ge=1)
    """the learning rate rises linearly from 0 over this many steps"""
    seed: int = Field(0, ge=0, lt=2**32)
    """seed of the data order"""


class SmallModel(Protocol):
    """What the entry point "small" attaches: a class that gets the whole config."""

    def tokenizer(self) -> Any: ...

    def make(self) -> None:
        """Write `<run folder>/model`, unless it exists or the config names another model."""


def small_model(config: Section) -> SmallModel:
    """Return what builds the model of a config without [policy] model. Raises ConfigError."""
    model: SmallModel = load_object(attached("rolloutmq.models")["small"], kind="model")(config)
    return model
