"""Load the policy, or its reference: whole on one rank, sharded on several."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from buffer.errors import ConfigError
from buffer.wire.expert_gates import expert_gates
from consumer.config.learner import LearnerConfig
from consumer.grpo.model_state.sharding import empty_model, load_shards, place, shard
from consumer.grpo.models.device_choices import choose_attention
from consumer.grpo.models.model_folder import load_model
from consumer.grpo.policy.logprobs import TargetLogits
from consumer.handle.ranks import Ranks

# What torch.compile calls: a variable that names a program, and programs.
COMPILERS = {"cpu": ("CXX", "g++", "clang++"), "cuda": ("CC", "gcc", "clang")}


def compile_layers(model: nn.Module, device: torch.device) -> None:
    """Compile each layer at its first calls, for all sizes. Raises ConfigError where it cannot."""
    variable, *programs = COMPILERS[device.type]
    if not any(shutil.which(name) for name in (os.environ.get(variable, ""), *programs)):
        raise ConfigError(
            f"[learner] compile = true needs a compiler for {device.type}, and this machine has "
            f"none of {' and '.join(programs)}",
            hint=f"install {programs[0]}, or name a compiler in {variable}; or compile = false",
        )
    if expert_gates(model):
        raise ConfigError(
            "[learner] compile = true: a mixture of experts cannot be compiled, because the number "
            "of tokens of an expert is known at run time only",
            hint="compile = false",
        )
    layers = [each for each in model.modules() if isinstance(each, GradientCheckpointingLayer)]
    if not layers:
        raise ConfigError(
            f"[learner] compile = true: {type(model).__name__} has no layers that can be compiled",
            hint="compile = false",
        )
    limits = torch._dynamo.config
    # Most compiled variants of a layer, beyond which torch runs it uncompiled: one row or several,
    # with mask, gradient, training or not; torch's default is 8.
    limits.recompile_limit = max(limits.recompile_limit, 64)
    for layer in layers:
        layer.forward = torch.compile(layer.forward, dynamic=True)


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

    `bf16`: compute in bfloat16. `dtype`: of its parameters; default: float32. Raises ModelError for
    an unusable model, ConfigError if its attention or compilation cannot run.
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
