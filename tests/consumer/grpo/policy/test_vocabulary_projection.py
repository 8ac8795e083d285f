from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from consumer.config.learner import LearnerConfig
from consumer.grpo.policy import vocabulary_projection
from consumer.grpo.policy.policy import Policy
from consumer.grpo.policy.vocabulary_projection import LogitTransform, project
from tests.consumer.grpo.models.tiny import build_model, make_group, train_step
from tests.thoroughness import examples

GIB = 2**30


def full_logits(
    states: Tensor, head: nn.Linear, targets: Tensor, others: Tensor, transform: LogitTransform
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return what `project` returns, by the textbook and with all logits at once."""
    logits = head(states) * transform.scale
    if transform.cap is not None:
        logits = transform.cap * torch.tanh(logits / transform.cap)
    distribution = torch.log_softmax(logits / transform.temperature, -1)
    entropy = -(distribution.exp() * distribution).sum(-1)
    collision = distribution.exp().square().sum(-1)
    logprobs = distribution.gather(1, targets[:, None]).squeeze(1)
    return logprobs, distribution.gather(1, others), entropy, collision


@settings(max_examples=examples(60), deadline=None)
@given(
    tokens=st.integers(0, 40),
    vocabulary=st.integers(2, 60),
    rows=st.integers(1, 50),
    bias=st.booleans(),
    others=st.integers(0, 3),
    frozen=st.booleans(),
    entropy_gradient=st.booleans(),
    transform=st.builds(
        LogitTransform,
        scale=st.sampled_from([1.0, 0.25, 3.0]),
        cap=st.sampled_from([None, 2.0, 30.0]),
        temperature=st.sampled_from([1.0, 0.6, 1.7]),
    ),
    seed=st.integers(0, 1000),
)
def test_values_and_all_gradients_are_those_of_full_logits(
    tokens: int,
    vocabulary: int,
    rows: int,
    bias: bool,
    others: int,
    frozen: bool,
    entropy_gradient: bool,
    transform: LogitTransform,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    head = nn.Linear(8, vocabulary, bias=bias).requires_grad_(not frozen)
    nn.init.normal_(head.weight, std=0.7)
    states = torch.randn(tokens, 8, requires_grad=True)
    targets = torch.randint(vocabulary, (tokens,))
    other = torch.randint(vocabulary, (tokens, others))
    by_logprob, by_other = torch.randn(tokens), torch.randn(tokens, others)
    by_entropy = torch.randn(tokens) * entropy_gradient
    given = (by_logprob, by_other, by_entropy)
    inputs = [states, *(() if frozen else head.parameters())]

    expected = full_logits(states, head, targets, other, transform)
    wanted = torch.autograd.grad(expected[:3], inputs, given)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vocabulary_projection, "CHUNK_BYTES", 4 * vocabulary * rows)
        found = project(
            states,
            head,
            targets,
            transform,
            entropy_gradient=entropy_gradient,
            collision=True,
            others=other,
        )
        assert found.entropy.requires_grad == entropy_gradient
        assert found.others is not None
        outputs = (found.logprobs, found.others, found.entropy)[: 3 if entropy_gradient else 2]
        gradients = torch.autograd.grad(outputs, inputs, given[: len(outputs)])
    # the order of sums differs: float32 alone makes differences of about 1e-5
    torch.testing.assert_close(found.logprobs, expected[0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found.others, expected[1], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found.entropy, expected[2], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found.collision, expected[3], atol=1e-4, rtol=1e-4)
    for gradient, full in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(gradient, full, atol=1e-4, rtol=1e-4)


def test_a_head_in_bfloat16_sums_its_gradient_over_chunks_in_float32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    head = nn.Linear(16, 50, bias=True).bfloat16()
    states = torch.randn(512, 16)
    targets = torch.randint(50, (512,))

    def weight_gradient() -> Tensor:
        found = project(states, head, targets, LogitTransform())
        (gradient,) = torch.autograd.grad(found.logprobs.sum(), [head.weight])
        return gradient

    whole = weight_gradient()
    assert whole.dtype == torch.bfloat16
    monkeypatch.setattr(vocabulary_projection, "CHUNK_BYTES", 4 * 50)
    apart = (weight_gradient() - whole).float().abs().max() / whole.float().abs().max()
    # one rounding of a sum, where summing 512 terms in bfloat16 is off by tens of percent
    assert apart < 0.02


def memory(field: str) -> int:
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.split(field + ":")[1].split()[0]) * 1024


def peak_bytes(tokens: int) -> int:
    """Return the growth of this process's resident memory in a forward and backward pass."""
    head = nn.Linear(8, 151_936, bias=False)
    states = torch.randn(tokens, 8, requires_grad=True)
    targets = torch.randint(151_936, (tokens,))
    first = project(states[:8], head, targets[:8], LogitTransform())
    torch.autograd.backward(first.logprobs.sum())
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the peak starts here
    before = memory("VmRSS")
    found = project(states, head, targets, LogitTransform())
    torch.autograd.backward(found.logprobs.sum() + found.entropy.sum())
    return memory("VmHWM") - before


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_peak_at_a_real_vocabulary_stays_below_two_gib(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a number of chunks; full logits of these tokens are 4 of them, and take 16 in all."""
    most_chunks = 2 * GIB / vocabulary_projection.CHUNK_BYTES
    # malloc returns what is larger than 32 MiB at once
    monkeypatch.setattr(vocabulary_projection, "CHUNK_BYTES", 48 << 20)
    assert 1 < peak_bytes(330) / vocabulary_projection.CHUNK_BYTES < most_chunks


def test_an_answer_of_four_token_budgets_is_trained_and_its_attention_needs_no_mask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its row holds no other sample; a mask of an answer of 32,768 tokens would take 4 GiB."""
    model = build_model(tmp_path, layers=1, heads=1, intermediate=32)
    config = LearnerConfig(token_budget=2048, gradient_checkpointing=True)
    learner = Policy(model, config)
    attention = nn.functional.scaled_dot_product_attention
    masks: dict[int, Any] = {}

    def noted(query: Tensor, *args: Any, **options: Any) -> Tensor:
        masks[query.shape[2]] = options["attn_mask"]
        return attention(query, *args, **options)

    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", noted)
    group = make_group(0, prompt=6, lengths=[8192, 5])
    metrics = train_step(learner, [group], np.array([1.0, -1.0], np.float32))
    assert 0 < metrics["optim/grad_norm"] < float("inf")
    assert masks[max(masks)] is None
    assert max(masks) >= 8192
