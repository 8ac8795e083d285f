"""Load the policy, or its reference: whole on one rank, sharded on several."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedModel

from consumer.config.learner import LearnerConfig
from consumer.grpo.model_state.sharding import place, shard
from consumer.grpo.models.device_choices import choose_attention
from consumer.grpo.models.model_folder import load_model
from consumer.grpo.models.shards import empty_model, load_shards
from consumer.grpo.policy.compiled_layers import compile_layers
from consumer.grpo.policy.logprobs import TargetLogits
from consumer.handle.ranks import Ranks


def load_policy(
    model_dir: Path,
    config: LearnerConfig,
    device: torch.device,
    ranks: Ranks,
    *,
    bf16: bool,
    dtype: torch.dtype | None = None,
) -> TargetLogits:
    """Load the model of a folder: whole, or with several ranks the shards of this one.

    `bf16`: compute in bfloat16. `dtype`: of its parameters; default: float32. Raises ModelError
    where it cannot be loaded, ConfigError where the attention of the config cannot run or the
    layers cannot be compiled.
    """
    attention = choose_attention(config, model_dir, device, bf16=bf16)
    if ranks.size == 1:
        model = load_model(model_dir, dtype=dtype, attention=attention).to(device)
        if config.compile:
            compile_layers(model, device)
        return TargetLogits(model)
    model = empty_model(model_dir, dtype=dtype, attention=attention)
    if config.compile:
        compile_layers(model, device)
    policy = TargetLogits(model)
    methods = ("hidden", "own_logits")
    shard(policy, model, device, config.sharding, bf16=bf16, methods=methods)
    load_shards(model, model_dir)
    place(policy, device, config.sharding)
    return policy


def vocabulary_of(model: PreTrainedModel) -> int:
    """Return the number of token ids that a model can both read and predict."""
    tables = (model.get_input_embeddings(), model.get_output_embeddings())
    return min(int(table.weight.shape[0]) for table in tables)
