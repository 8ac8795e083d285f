"""The layers of a model compiled by `torch.compile`, one by one: the same code serves all of them.

Hooks stay outside of what is compiled: FSDP gathers a layer, and checkpointing repeats it, as they
do without.
"""

from __future__ import annotations

import os
import shutil

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from buffer.errors import ConfigError
from buffer.rollouts.expert_gates import expert_gates

COMPILERS = {"cpu": ("CXX", "g++", "clang++"), "cuda": ("CC", "gcc", "clang")}
"""What torch.compile calls on a device: a variable that names a program, and programs."""


VARIANTS = 64
"""Compiled variants of a layer at most, after which torch runs it uncompiled: one row or several,
with a mask or without, with a gradient or without, in training or not; torch's default is 8."""


def compile_layers(model: nn.Module, device: torch.device) -> None:
    """Compile each layer of `model` at its first calls, for all numbers of rows and tokens.

    Raises ConfigError where it cannot.
    """
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
    limits.recompile_limit = max(limits.recompile_limit, VARIANTS)
    for layer in layers:
        layer.forward = torch.compile(layer.forward, dynamic=True)
