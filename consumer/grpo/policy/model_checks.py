"""What training assumes about a model, tested on a few tokens when it is loaded.

An error would go unnoticed otherwise: training on wrong log-probabilities looks like training.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from buffer.errors import ModelError
from consumer.grpo.policy.logprobs import TargetLogits
from consumer.grpo.policy.vocabulary_projection import LogitTransform

log = logging.getLogger("rolloutmq.trainer")

TOKENS = 8  # compared with the model's own logprobs

# largest difference that counts as rounding
NATS = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}

FIRST = 4
SECOND = 6  # tokens of the second sample in `keeps_samples_apart`

# Share of the largest hidden value: above rounding, far below the effect of another token.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float16: 2e-3}

CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
"""Names in model configs of what is applied to logits. Not every model applies what its config
names, and HyperCLOVA X multiplies by what Granite divides by: each reading is tried."""


@contextmanager
def _probing(policy: TargetLogits) -> Iterator[None]:
    """Disable dropout, leave weights sharded, and compute in float32 if the attention can."""
    was_training = policy.model.training
    policy.eval()
    device = policy.model.device.type
    try:
        with torch.autocast(device, torch.bfloat16, enabled=policy.is_varlen):
            yield
    finally:
        policy.train(was_training)
        if isinstance(policy, FSDPModule):
            # the gathered copy stays until a backward pass, and would hide weights loaded meanwhile
            policy.reshard()


@torch.no_grad()
def check_logprobs(policy: TargetLogits) -> None:
    """Find the transform with which `policy` agrees with its model's own forward.

    Raises ModelError.
    """
    ids = torch.arange(TOKENS, device=policy.model.device)
    name = type(policy.model).__name__
    try:
        with _probing(policy):
            logits = policy.own_logits(ids[None])[0, :-1]
            distribution = logits.float().log_softmax(-1)
            logprobs = distribution.gather(1, ids[1:, None]).squeeze(1)
            entropy = -(distribution.exp() * distribution).sum(-1)
            slots = torch.arange(len(ids), device=ids.device)
            differences: dict[LogitTransform, float] = {}  # the largest, in nats
            for transform in _transforms(policy.model.config.get_text_config()):
                policy.transform = transform
                found = policy(ids[None], slots[None], slots[:-1], ids[1:])
                differences[transform] = max(
                    float((logprobs - found.logprobs).abs().max()),
                    float((entropy - found.entropy).abs().max()),
                )
    except Exception as error:  # the code of any architecture
        raise ModelError(
            f"log-probabilities of {name} cannot be computed: {type(error).__name__}: {error}",
            hint="train it with a loop of your own ([trainer] loop)",
        ) from error
    policy.transform = min(differences, key=lambda transform: differences[transform])
    least = differences[policy.transform]
    # not "more than": the difference may be nan
    if not least <= max(NATS[logits.dtype], NATS[policy.model.dtype]):
        raise ModelError(
            f"log-probabilities of {name} cannot be computed from its hidden states and output "
            f"embedding: {least:.3g} nats from its own forward pass",
            hint="its forward pass does more to the logits than to scale and to cap them; "
            "train it with a loop of your own ([trainer] loop)",
        )


def _transforms(config: Any) -> Iterator[LogitTransform]:
    """Yield each reading of a model's config; the first is the plain one."""
    scale = 1.0
    for value in _values(config, ("logit_scale", "lm_head_multiplier", "output_multiplier")):
        scale *= value
    for value in _values(config, ("logits_scaling",)):
        scale /= value
    caps = list(_values(config, CAPS))
    for cap, factor in product(
        dict.fromkeys((*caps, None)), dict.fromkeys((scale, 1 / scale, 1.0))
    ):
        yield LogitTransform(scale=factor, cap=cap)


def _values(config: Any, names: tuple[str, ...]) -> Iterator[float]:
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, int | float) and value > 0:
            yield float(value)


@torch.no_grad()
def keeps_samples_apart(policy: TargetLogits) -> bool:
    """Return whether the second sample of a row is independent of the tokens of the first.

    Linear attention (Qwen3-Next, Mamba) carries its state across samples, and some older models
    (OPT, Bloom) ignore positions in their mask.
    """
    positions = torch.cat([torch.arange(FIRST), torch.arange(SECOND)])[None]
    seconds = []  # hidden states of the second sample, [SECOND, width]
    for first_id in (0, 1):
        ids = torch.cat([torch.full((FIRST,), first_id), torch.arange(SECOND)])[None]
        places = (each.to(policy.model.device) for each in (ids, positions))
        with _probing(policy):
            seconds.append(policy.hidden(*places)[0, FIRST:])
    hidden, other = seconds
    precision = torch.bfloat16 if policy.is_varlen else hidden.dtype
    change = (hidden - other).abs().max()
    is_apart = bool(change <= TOLERANCE[precision] * hidden.abs().max())
    if not is_apart:
        log.warning(
            "attention of %s crosses samples that share a row: each sample gets a row of its own",
            type(policy.model).__name__,
        )
    return is_apart
