"""The vocabulary projection in chunks: the numbers of full logits, in bounded memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from buffer.config.sections.learner import LearnerConfig
from buffer.config.sections.warm_start import TinyModelConfig
from consumer.learner.learner import Learner
from consumer.models.tiny_model import build_tiny_model
from consumer.policy import vocabulary_projection
from consumer.policy.vocabulary_projection import LogitTransform, project
from tests.consumer.models.tiny import make_group, train_step

ROOT = Path(__file__).parents[3]
GIB = 2**30


def full_logits(
    states: Tensor, head: nn.Linear, targets: Tensor, transform: LogitTransform
) -> tuple[Tensor, Tensor]:
    """Return what `project` returns, by the textbook and with all logits at once."""
    logits = head(states) * transform.scale
    if transform.cap is not None:
        logits = transform.cap * torch.tanh(logits / transform.cap)
    distribution = torch.log_softmax(logits / transform.temperature, -1)
    entropy = -(distribution.exp() * distribution).sum(-1)
    return distribution.gather(1, targets[:, None]).squeeze(1), entropy


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(0, 40),
    vocabulary=st.integers(2, 60),
    rows=st.integers(1, 50),
    bias=st.booleans(),
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
    by_logprob = torch.randn(tokens)
    by_entropy = torch.randn(tokens) * entropy_gradient
    inputs = [states, *(() if frozen else head.parameters())]

    expected = full_logits(states, head, targets, transform)
    wanted = torch.autograd.grad(expected, inputs, (by_logprob, by_entropy))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vocabulary_projection, "CHUNK_BYTES", 4 * vocabulary * rows)
        found = project(states, head, targets, transform, entropy_gradient=entropy_gradient)
        assert found.entropy.requires_grad == entropy_gradient
        outputs = found if entropy_gradient else found[:1]
        gradients = torch.autograd.grad(outputs, inputs, (by_logprob, by_entropy)[: len(outputs)])
    torch.testing.assert_close(found.logprobs, expected[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found.entropy, expected[1], atol=1e-5, rtol=1e-5)
    for gradient, full in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(gradient, full, atol=1e-5, rtol=1e-5)


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


PEAK = """
import sys, torch
from torch import nn
from consumer.policy.vocabulary_projection import LogitTransform, project
tokens, entropy_gradient = int(sys.argv[1]), sys.argv[2] == "True"
def kib(field):
    return int(open("/proc/self/status").read().split(field + ":")[1].split()[0])
head = nn.Linear(8, 151_936, bias=False)
states = torch.randn(tokens, 8, requires_grad=True)
targets = torch.randint(151_936, (tokens,))
project(states[:8], head, targets[:8], LogitTransform()).logprobs.sum().backward()
open("/proc/self/clear_refs", "w").write("5")  # the peak starts here
before = kib("VmRSS")
found = project(states, head, targets, LogitTransform(), entropy_gradient=entropy_gradient)
(found.logprobs.sum() + found.entropy.sum() * entropy_gradient).backward()
print((kib("VmHWM") - before) * 1024)
"""


def peak_bytes(tokens: int, *, entropy_gradient: bool) -> int:
    """Return the growth of a fresh process's resident memory in a forward and backward pass."""
    command = [sys.executable, "-c", PEAK, str(tokens), str(entropy_gradient)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_peak_at_a_real_vocabulary_stays_below_two_gib() -> None:
    """It is the same for 1,024 tokens as for 8,192; full logits of 8,192 need 4.6 GiB and their gradient more."""
    assert peak_bytes(1024, entropy_gradient=True) < 2 * GIB


def test_an_answer_of_32768_tokens_trains_at_a_small_token_budget(tmp_path: Path) -> None:
    """Its row holds no other sample, so attention needs no mask of [32768, 32768]."""
    spec = TinyModelConfig(hidden=32, layers=1, heads=1, kv_heads=1, head_dim=32, intermediate=32)
    build_tiny_model(tmp_path / "model", spec, seed=0)
    config = LearnerConfig(token_budget=8192, gradient_checkpointing=True)
    learner = Learner(tmp_path / "model", config)
    group = make_group(0, lengths=[32_768, 5])
    metrics = train_step(learner, [group], np.array([1.0, -1.0], np.float32))
    assert 0 < metrics["optim/grad_norm"] < float("inf")
