"""The loss against a token-by-token transcription in plain Python floats."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from consumer.learner_config import LossConfig
from consumer.losses import TokenColumns, importance_weights, kl_k3, policy_loss, token_weights

LENGTHS = [3, 1, 5, 2]


def make_columns(seed: int = 0, *, with_reference: bool = True) -> tuple[TokenColumns, torch.Tensor]:
    """Columns of four samples, and the sample of each token."""
    draw = np.random.default_rng(seed)
    tokens = sum(LENGTHS)
    sample = np.repeat(np.arange(len(LENGTHS)), LENGTHS)

    def logprobs() -> torch.Tensor:
        return torch.tensor(draw.uniform(-2, -0.05, tokens))

    mask = torch.tensor((draw.random(tokens) > 0.3).astype(float))
    mask[0] = 1.0
    columns = TokenColumns(
        logprobs=logprobs().requires_grad_(),
        old_logprobs=logprobs(),
        rollout_logprobs=logprobs(),
        advantages=torch.tensor(draw.normal(size=len(LENGTHS))[sample]),
        mask=mask,
        entropy=torch.tensor(draw.uniform(0, 2, tokens)),
        ref_logprobs=logprobs() if with_reference else None,
    )
    return columns, torch.tensor(sample)


def weigh(columns: TokenColumns, sample: torch.Tensor, config: LossConfig) -> torch.Tensor:
    trained = torch.zeros(len(LENGTHS), dtype=torch.float64).index_add(0, sample, columns.mask)
    return token_weights(
        columns.mask,
        sample,
        trained,
        config,
        batch_tokens=float(columns.mask.sum()),
        batch_samples=len(LENGTHS),
    )


def transcribed_loss(columns: TokenColumns, sample: torch.Tensor, config: LossConfig) -> float:
    """PPO's clipped objective, written token by token."""
    per_sample: list[list[float]] = [[] for _ in LENGTHS]
    for t in range(len(sample)):
        if columns.mask[t] == 0:
            continue
        new, old = columns.logprobs[t].detach().item(), columns.old_logprobs[t].item()
        rollout = columns.rollout_logprobs[t].item()
        advantage, ratio = float(columns.advantages[t]), math.exp(new - old)
        clipped = min(max(ratio, 1 - config.clip_low), 1 + config.clip_high)
        loss = -min(ratio * advantage, clipped * advantage)
        if config.importance_cap is not None:
            loss *= min(math.exp(old - rollout), config.importance_cap)
        if columns.ref_logprobs is not None:
            difference = float(columns.ref_logprobs[t]) - new
            loss += config.kl_coef * (math.exp(difference) - difference - 1)
        per_sample[int(sample[t])].append(loss - config.entropy_coef * columns.entropy[t].detach().item())
    if config.aggregation == "token_mean":
        return sum(map(sum, per_sample)) / sum(map(len, per_sample))
    if config.aggregation == "sequence_mean":
        return sum(sum(s) / max(1, len(s)) for s in per_sample) / len(per_sample)
    return sum(sum(s) / (config.max_tokens or 1) for s in per_sample) / len(per_sample)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "fixed_length"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"clip_low": 0.05, "clip_high": 0.5},
        {"importance_cap": None},
        {"importance_cap": 0.7},
        {"kl_coef": 0.3, "entropy_coef": 0.1},
    ],
)
def test_policy_loss_equals_its_transcription(aggregation: str, options: dict[str, Any]) -> None:
    config = LossConfig(aggregation=aggregation, max_tokens=9, **options)
    for seed in range(5):
        columns, sample = make_columns(seed)
        loss, _ = policy_loss(columns, weigh(columns, sample, config), config)
        assert loss.detach().item() == pytest.approx(transcribed_loss(columns, sample, config), rel=1e-9)


def test_policy_loss_is_reinforce_when_the_policy_has_not_moved() -> None:
    columns, sample = make_columns(with_reference=False)
    same = columns.logprobs.detach().clone()
    columns = TokenColumns(columns.logprobs, same, same, columns.advantages, columns.mask, columns.entropy)
    config = LossConfig()
    loss, metrics = policy_loss(columns, weigh(columns, sample, config), config)
    loss.backward()  # type: ignore[no-untyped-call]
    expected = -columns.advantages * columns.mask / columns.mask.sum()
    torch.testing.assert_close(columns.logprobs.grad, expected)
    assert metrics["policy/clip_fraction"] == 0


@pytest.mark.parametrize(
    ("advantage", "ratio", "gradient"),
    [(1, 1.5, False), (1, 0.5, True), (-1, 1.5, True), (-1, 0.5, False), (1, 1.25, True), (-1, 0.85, True)],
)
def test_policy_loss_stops_the_gradient_only_outside_the_bound_that_helps(
    advantage: float, ratio: float, gradient: bool
) -> None:
    new = torch.tensor([math.log(ratio) - 3], requires_grad=True)
    old, one = torch.tensor([-3.0]), torch.ones(1)
    columns = TokenColumns(new, old, old, torch.tensor([float(advantage)]), one, one)
    loss, metrics = policy_loss(columns, one, LossConfig(clip_low=0.2, clip_high=0.28))
    loss.backward()  # type: ignore[no-untyped-call]
    assert new.grad is not None
    assert bool(new.grad != 0) is gradient
    assert bool(metrics["policy/clip_fraction"] == 0) is gradient


def test_policy_loss_ignores_a_masked_token_when_its_logprob_is_infinite() -> None:
    new = torch.tensor([-1.0, -math.inf], requires_grad=True)
    other, mask = torch.tensor([-1.0, -1.0]), torch.tensor([1.0, 0.0])
    columns = TokenColumns(new, other, other, torch.ones(2), mask, torch.zeros(2))
    loss, metrics = policy_loss(columns, mask, LossConfig())
    assert math.isfinite(loss.item())
    assert all(math.isfinite(float(value)) for value in metrics.values())


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_token_weights_add_up_to_one_where_no_sample_is_empty(aggregation: str) -> None:
    columns, sample = make_columns()
    full = TokenColumns(*(columns.logprobs,) * 4, torch.ones_like(columns.mask), columns.entropy)
    config = LossConfig(aggregation=aggregation)
    assert float(weigh(full, sample, config).sum()) == pytest.approx(1.0)


def test_importance_weights_are_capped_and_carry_no_gradient() -> None:
    old = torch.tensor([-1.0, -1.0, -1.0], requires_grad=True)
    weights = importance_weights(old, torch.tensor([-1.0, -4.0, -0.5]), 2.0)
    assert not weights.requires_grad
    np.testing.assert_allclose(weights, [1.0, 2.0, math.exp(-0.5)], rtol=1e-6)


def test_kl_k3_has_the_mean_of_the_kl_divergence() -> None:
    policy, reference = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.5, 0.3, 0.2])
    kl = (policy * (policy / reference).log()).sum()
    torch.testing.assert_close((policy * kl_k3(policy.log(), reference.log())).sum(), kl)


def test_loss_config_refuses_fixed_length_without_its_divisor() -> None:
    with pytest.raises(ValueError, match="needs max_tokens"):
        LossConfig(aggregation="fixed_length")
