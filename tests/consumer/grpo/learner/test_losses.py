from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
import torch

from consumer.config.learner import OBJECTIVES, KlKind, LossConfig
from consumer.grpo.learner.losses import (
    Samples,
    TokenColumns,
    correct,
    derived_metrics,
    policy_loss,
    token_weights,
)

LENGTHS = [3, 1, 5, 2]


def make_columns(
    seed: int = 0, *, with_reference: bool = True, spread: float = 2.0, old_is_rollout: bool = False
) -> TokenColumns:
    """Columns of four samples, one of them of one token; some tokens are masked."""
    draw = np.random.default_rng(seed)
    tokens = sum(LENGTHS)
    sample = np.repeat(np.arange(len(LENGTHS)), LENGTHS)

    def logprobs() -> torch.Tensor:
        return torch.tensor(draw.uniform(-spread, -0.05, tokens))

    mask = torch.tensor((draw.random(tokens) > 0.3).astype(float))
    mask[0] = 1.0
    new, old, rollout = logprobs(), logprobs(), logprobs()
    return TokenColumns(
        logprobs=new.requires_grad_(),
        old_logprobs=rollout if old_is_rollout else old,
        rollout_logprobs=rollout,
        advantages=torch.tensor(draw.normal(size=len(LENGTHS))[sample]),
        samples=make_samples(mask, torch.tensor(sample)),
        entropy=torch.tensor(draw.uniform(0, 2, tokens)),
        ref_logprobs=logprobs() if with_reference else None,
        old_is_rollout=old_is_rollout,
    )


def make_samples(mask: torch.Tensor, sample: torch.Tensor) -> Samples:
    counts = torch.zeros(int(sample.max()) + 1, dtype=mask.dtype).index_add(0, sample, mask)
    return Samples(mask, sample, counts)


def one_sample(mask: torch.Tensor) -> Samples:
    return make_samples(mask, torch.zeros(len(mask), dtype=torch.long))


def weigh(columns: TokenColumns, config: LossConfig) -> torch.Tensor:
    tokens = float(columns.mask.sum())
    return token_weights(columns.samples, config, batch_tokens=tokens, batch_samples=len(LENGTHS))


class Transcription:
    """The loss as the papers write it: sample by sample, token by token."""

    def __init__(self, columns: TokenColumns, config: LossConfig) -> None:
        self.c = columns
        self.config = config
        self.new, self.old, self.rollout = (
            column.detach().tolist()
            for column in (columns.logprobs, columns.old_logprobs, columns.rollout_logprobs)
        )
        owner = columns.samples.sample.tolist()
        mask = columns.mask.tolist()
        self.tokens = [
            [t for t in range(len(owner)) if owner[t] == s and mask[t]] for s in range(len(LENGTHS))
        ]

    def loss(self) -> float:
        per_sample = [[self.token(t, sample) for t in sample] for sample in self.tokens]
        match self.config.aggregation:
            case "token_mean":
                return sum(map(sum, per_sample)) / sum(map(len, per_sample))
            case "sequence_mean":
                return sum(sum(s) / max(1, len(s)) for s in per_sample) / len(per_sample)
        return sum(sum(s) / (self.config.max_tokens or 1) for s in per_sample) / len(per_sample)

    def token(self, t: int, sample: list[int]) -> float:
        config = self.config
        weight = self.importance(t, sample)
        if weight == 0.0:
            return 0.0
        far = sum(self.rollout[u] - self.new[u] for u in sample) / len(sample)
        bound = config.off_policy_mask
        if self.c.old_is_rollout:
            weight = 1.0
        if bound is not None and far > bound and float(self.c.advantages[t]) < 0:
            weight = 0.0
        loss = weight * self.objective(t, sample)
        if self.c.ref_logprobs is not None:
            d = self.new[t] - float(self.c.ref_logprobs[t])
            kinds = {"abs": abs(d), "k2": d * d / 2, "k3": math.exp(-d) - 1 + d}
            sampled = self.rollout if config.importance_cap else self.old
            own = min(math.exp(self.new[t] - sampled[t]), config.importance_cap or math.inf)
            loss += config.kl_coef * own * kinds[config.kl_kind]
        return loss - config.entropy_coef * float(self.c.entropy[t])

    def objective(self, t: int, sample: list[int]) -> float:
        config = self.config
        advantage = float(self.c.advantages[t])
        ratio = math.exp(self.new[t] - self.old[t])
        if config.objective == "gspo":
            ratio = math.exp(sum(self.new[u] - self.old[u] for u in sample) / len(sample))
        clipped = min(max(ratio, 1 - config.clip_low), 1 + config.clip_high)
        if config.objective == "cispo":
            return float(-clipped * advantage * self.new[t])
        if config.objective == "sapo":
            heat = 1.0 if advantage > 0 else 1.05
            return -4 / heat / (1 + math.exp(-heat * (ratio - 1))) * advantage
        gain = min(ratio * advantage, clipped * advantage)
        if config.dual_clip is not None and advantage < 0:
            gain = max(gain, config.dual_clip * advantage)
        if config.objective == "dppo":
            change = math.exp(self.new[t]) - math.exp(self.old[t])
            is_too_far = change > config.clip_high if advantage > 0 else -change > config.clip_low
            gain = 0.0 if is_too_far else ratio * advantage
        if self.c.old_is_rollout and config.importance_cap is not None:
            gain *= min(1.0, config.importance_cap / ratio)
        return float(-gain)

    def importance(self, t: int, sample: list[int]) -> float:
        config = self.config
        if config.importance_cap is None:
            return 1.0
        before = self.new if self.c.old_is_rollout else self.old
        logs = {u: before[u] - self.rollout[u] for u in sample}
        if config.importance_veto is not None and min(logs.values()) < math.log(
            config.importance_veto
        ):
            return 0.0
        total = sum(logs.values())
        level = {"token": logs[t], "sequence": total, "geometric": total / len(sample)}[
            config.importance_level
        ]
        weight: float = math.exp(level)
        if config.importance_mode == "mask":
            return weight if config.importance_floor <= weight <= config.importance_cap else 0.0
        return min(weight, config.importance_cap)


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("old_is_rollout", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"clip_low": 0.05, "clip_high": 0.1},
        {"importance_cap": None},
        {"importance_cap": 0.7},
        {"importance_level": "sequence", "importance_cap": 1.5},
        {"importance_level": "geometric", "importance_cap": 1.1},
        {"importance_mode": "mask", "importance_cap": 1.4, "importance_floor": 0.6},
        {"importance_mode": "mask", "importance_level": "geometric", "importance_cap": 1.2, "importance_floor": 0.8},
        {"importance_veto": 0.4, "kl_coef": 0.3, "entropy_coef": 0.1},
        {"kl_coef": 0.3, "entropy_coef": 0.1},
        {"off_policy_mask": 0.2},
        {"kl_coef": 0.3, "kl_kind": "abs"},
        {"kl_coef": 0.3, "kl_kind": "k2"},
    ],
    ids=str,
)  # fmt: skip
def test_policy_loss_equals_its_transcription(
    objective: str, old_is_rollout: bool, options: dict[str, Any]
) -> None:
    if objective == "sapo" and "clip_low" in options:
        return
    for seed, aggregation in enumerate(["token_mean", "sequence_mean", "fixed_length"] * 2):
        longest = 9 if aggregation == "fixed_length" else None
        names: dict[str, Any] = {"aggregation": aggregation, "objective": objective}
        config = LossConfig(**names, max_tokens=longest, **options)
        columns = make_columns(seed, old_is_rollout=old_is_rollout)
        loss, _ = policy_loss(columns, weigh(columns, config), config)
        assert loss.detach().item() == pytest.approx(
            Transcription(columns, config).loss(), rel=1e-6, abs=1e-12
        )


def test_dual_clip_equals_its_transcription_and_bounds_negative_advantages() -> None:
    config = LossConfig(dual_clip=1.5)
    differs = 0
    for seed in range(8):
        columns = make_columns(seed, with_reference=False, spread=4.0)
        loss, _ = policy_loss(columns, weigh(columns, config), config)
        assert loss.detach().item() == pytest.approx(
            Transcription(columns, config).loss(), rel=1e-9
        )
        plain, _ = policy_loss(columns, weigh(columns, LossConfig()), LossConfig())
        differs += bool(plain != loss)
    assert differs


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_gradient_is_reinforce_when_the_policy_has_not_moved(objective: str) -> None:
    columns = make_columns(with_reference=False)
    same = columns.logprobs.detach().clone()
    # one sample alone: GSPO spreads a sample's gradient evenly over its tokens
    samples = one_sample(columns.mask)
    advantages = columns.advantages if objective != "gspo" else torch.full_like(same, -0.7)
    columns = TokenColumns(columns.logprobs, same, same, advantages, samples, columns.entropy)
    config = LossConfig(objective=objective)
    weights = token_weights(
        samples, config, batch_tokens=float(columns.mask.sum()), batch_samples=1
    )
    loss, metrics = policy_loss(columns, weights, config)
    loss.backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(
        columns.logprobs.grad, -advantages * columns.mask / columns.mask.sum()
    )
    assert metrics["policy/clip_fraction"] == 0


@pytest.mark.parametrize(
    ("objective", "advantage", "sampled", "gradient"),
    [
        ("ppo", 1, 0.5, 0.0),  # above 1 + clip_high
        ("ppo", 1, 0.72, 0.7 / 0.72),
        ("ppo", -1, 0.95, 0.0),  # below 1 - clip_low
        ("ppo", -1, 0.5, 1.4),
        ("ppo", -1, 1e-6, 2.0),  # an engine that was wrong: the weight is capped
        ("dppo", 1, 0.4, 0.0),
        ("dppo", 1, 0.5, 1.4),
        ("dppo", -1, 0.95, 0.0),
        ("dppo", -1, 1e-6, 2.0),
    ],
)
def test_the_ratio_to_the_sampling_policy_is_bounded_by_the_sign_of_the_advantage(
    objective: str, advantage: float, sampled: float, gradient: float
) -> None:
    new = torch.tensor([math.log(0.7)], requires_grad=True)
    rollout = torch.tensor([math.log(sampled)])
    one = torch.ones(1)
    columns = TokenColumns(
        new, rollout, rollout, advantage * one, one_sample(one), one, old_is_rollout=True
    )
    config = LossConfig(objective=objective, clip_low=0.2, clip_high=0.28)
    loss, metrics = policy_loss(columns, one, config)
    loss.backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(new.grad, torch.tensor([-advantage * gradient]))
    assert metrics["policy/clip_fraction"] == (gradient == 0)


@pytest.mark.parametrize(
    ("objective", "advantage", "ratio", "gradient"),
    [
        ("cispo", 1, 0.3, 0.3),  # no lower bound
        ("cispo", -1, 0.3, 0.3),
        ("cispo", 1, 7.0, 1.28),
        ("gspo", 1, 0.5, 0.5),  # a bound holds on the side that helps alone
        ("gspo", -1, 1.5, 1.5),
        ("gspo", 1, 1.0005, 0.0),
        ("gspo", 1, 1.0003, 1.0003),
        ("gspo", -1, 0.9996, 0.0),
        ("gspo", -1, 0.9998, 0.9998),
        ("dppo", 1, 9.0, 9.0),  # of a probability of 0.01
        ("dppo", 1, 17.0, 0.0),
        ("ppo", 1, 0.5, 0.5),
        ("ppo", -1, 1.5, 1.5),
        ("ppo", 1, 1.27, 1.27),
        ("ppo", 1, 1.29, 0.0),
        ("ppo", -1, 0.79, 0.0),
    ],
)
def test_without_bounds_in_the_config_an_objective_has_those_of_its_paper(
    objective: str, advantage: int, ratio: float, gradient: float
) -> None:
    new = torch.tensor([math.log(ratio * 0.01)], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([math.log(0.01)], dtype=torch.float64)
    one = torch.ones(1).double()
    columns = TokenColumns(new, old, old, advantage * one, one_sample(one), one)
    loss, metrics = policy_loss(columns, one, LossConfig(objective=objective))
    loss.backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(new.grad, torch.tensor([-advantage * gradient]).double())
    assert metrics["policy/clip_fraction"] == (gradient != ratio)


@pytest.mark.parametrize(
    ("objective", "aggregation"),
    [("ppo", "token_mean"), ("gspo", "sequence_mean"), ("sapo", "sequence_mean")],
)
def test_an_objective_adds_tokens_up_as_its_paper_does(objective: str, aggregation: str) -> None:
    columns = make_columns()
    own = weigh(columns, LossConfig(objective=objective))
    named: dict[str, Any] = {"objective": "ppo", "aggregation": aggregation}
    torch.testing.assert_close(own, weigh(columns, LossConfig(**named)))


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("kind", get_args(KlKind))
def test_no_value_of_a_token_makes_a_gradient_that_is_not_finite(
    objective: str, level: str, kind: KlKind
) -> None:
    """The first sample is ordinary, the second has impossible tokens, the third is masked."""
    bad = torch.tensor([-1.0, -120.0, -0.1, -math.inf, -1e30, -1.0])
    good = torch.tensor([-1.0, -0.1, -120.0, -1.0, -1.0, math.nan])
    mask = torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0, 0.0])
    samples = make_samples(mask, torch.tensor([0, 1, 1, 2, 2, 2]))
    options: dict[str, Any] = {"objective": objective, "importance_level": level}
    config = LossConfig(**options, kl_coef=0.1, kl_kind=kind, entropy_coef=0.1)
    for new, other in ((bad, good), (good, bad)):
        for advantage in (1.0, -1.0):
            trained = new.clone().requires_grad_()
            advantages = torch.full((6,), advantage)
            columns = TokenColumns(trained, other, new, advantages, samples, -new, other)
            loss, metrics = policy_loss(columns, mask / 3, config)
            loss.backward()  # type: ignore[no-untyped-call]
            assert trained.grad is not None
            assert trained.grad.isfinite().all()
            assert trained.grad[0] != 0
            assert not trained.grad[3:].any()
            assert all(math.isfinite(float(value)) for value in metrics.values())


def test_correction_survives_ratios_that_no_float_holds() -> None:
    config = LossConfig(importance_level="sequence", importance_cap=2.0)
    old = torch.full((5000,), -0.01)
    rollout = torch.full((5000,), -5.0)
    assert (
        correct(old, rollout, one_sample(torch.ones(5000)), config).weights.tolist() == [2.0] * 5000
    )
    assert torch.isfinite(correct(rollout, old, one_sample(torch.ones(5000)), config).weights).all()


@pytest.mark.parametrize("spread", [0.0, 0.5], ids=["on-policy", "off-policy"])
@pytest.mark.parametrize("old_is_rollout", [False, True])
def test_the_kl_and_its_gradient_are_exact_in_expectation_over_what_another_policy_sampled(
    spread: float, old_is_rollout: bool
) -> None:
    """k2's value is another distance, and its gradient is that of the KL."""
    draw = torch.Generator().manual_seed(3)
    noise, present, start = torch.randn(3, 9, generator=draw).double()
    logits = present.requires_grad_()
    policy = logits.log_softmax(0)
    reference = start.log_softmax(0)
    sampling = (present.detach() + spread * noise).log_softmax(0)
    kl = (policy.exp() * (policy - reference)).sum()
    (slope,) = torch.autograd.grad(kl, logits, retain_graph=True)
    ones = torch.ones(9).double()
    columns = TokenColumns(
        policy,
        sampling if old_is_rollout else policy.detach(),
        sampling,
        0 * ones,
        make_samples(ones, torch.arange(9)),
        ones,
        reference,
        old_is_rollout=old_is_rollout,
    )
    for kind in ("k3", "k2"):
        config = LossConfig(kl_coef=1.0, kl_kind=kind, importance_cap=1e6)
        loss, metrics = policy_loss(columns, sampling.exp(), config)
        (found,) = torch.autograd.grad(loss, logits, retain_graph=True)
        torch.testing.assert_close(found, slope)
        if kind == "k3":
            torch.testing.assert_close(loss, kl)
    masked = torch.zeros(9).double()
    mean = 0.0
    for word in range(9):
        mask = masked.index_fill(0, torch.tensor([word]), 1.0)
        own = replace(columns, samples=make_samples(mask, torch.arange(9)))
        _, metrics = policy_loss(own, mask, config)
        mean += float(sampling.exp()[word] * metrics["policy/kl_ref"])
    assert mean == pytest.approx(kl.item())


@pytest.mark.parametrize("spread", [0.3, 3.0])
def test_kl_metrics_have_the_divergence_from_the_sampling_policy_as_mean(spread: float) -> None:
    """The exact expectation over a vocabulary, for tokens that the sampling policy chose."""
    draw = torch.Generator().manual_seed(3)
    sampling, policy = (spread * torch.randn(2, 9, generator=draw)).double().log_softmax(1)
    chances = sampling.exp()
    samples = make_samples(torch.ones(9).double(), torch.arange(9))
    columns = TokenColumns(
        policy, sampling, sampling, torch.ones(9).double(), samples, torch.zeros(9).double()
    )
    found: dict[str, float] = {"mismatch/kl": 0.0, "policy/kl_old": 0.0}
    for word in range(9):
        mask = torch.zeros(9).double().index_fill(0, torch.tensor([word]), 1.0)
        own = replace(columns, samples=make_samples(mask, torch.arange(9)))
        _, metrics = policy_loss(own, mask, LossConfig())
        for name in found:
            found[name] += float(chances[word] * metrics[name])
    exact = float((chances * (sampling - policy)).sum())
    assert found == pytest.approx(dict.fromkeys(found, exact), rel=1e-9)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"aggregation": "fixed_length"}, "needs max_tokens"),
        ({"objective": "gspo", "dual_clip": 3.0}, "dual_clip belongs to objective ppo"),
        ({"max_tokens": 9}, "read by aggregation = fixed_length only"),
        ({"importance_floor": 0.5}, "needs importance_mode = mask"),
        ({"importance_mode": "mask", "importance_floor": 3.0}, "must enclose 1"),
        ({"importance_mode": "mask", "importance_floor": 1.1}, "must enclose 1"),
        ({"importance_mode": "mask", "importance_cap": 0.9}, "must enclose 1"),
        ({"kl_kind": "k2"}, "kl_kind needs kl_coef"),
        ({"importance_cap": None, "importance_veto": 0.1}, "importance_veto cannot act without"),
    ],
)
def test_loss_config_refuses_what_does_not_fit(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LossConfig(**options)


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("mask", [[0.0, 0.0, 0.0], []], ids=["fully masked", "empty"])
def test_a_batch_without_a_trained_token_has_no_loss_and_no_gradient(
    objective: str, level: str, mask: list[float]
) -> None:
    new = torch.full((len(mask),), -1.0, requires_grad=True)
    samples = Samples(
        torch.tensor(mask), torch.zeros(len(mask), dtype=torch.long), torch.zeros(min(1, len(mask)))
    )
    other = torch.full((len(mask),), -2.0)
    columns = TokenColumns(
        new, other, other, torch.ones(len(mask)), samples, torch.ones(len(mask)), other
    )
    config = LossConfig(objective=objective, importance_level=level, kl_coef=0.1, entropy_coef=0.1)
    for aggregation in ("token_mean", "sequence_mean"):
        weights = token_weights(
            samples,
            config.model_copy(update={"aggregation": aggregation}),
            batch_tokens=0.0,
            batch_samples=1,
        )
        loss, metrics = policy_loss(columns, weights, config)
        loss.backward()  # type: ignore[no-untyped-call]
        assert loss.item() == 0.0
        assert not any(float(value) for value in metrics.values())
    assert new.grad is not None
    assert not new.grad.any()


@pytest.mark.parametrize("old_is_rollout", [False, True])
@pytest.mark.parametrize("cap", [1.5, None])
def test_mismatch_metrics_equal_their_transcription(
    cap: float | None, old_is_rollout: bool
) -> None:
    columns = make_columns(3, old_is_rollout=old_is_rollout)
    config = LossConfig(importance_cap=cap)
    _, sums = policy_loss(columns, weigh(columns, config), config)
    n = float(columns.mask.sum())
    metrics = derived_metrics({name: float(value) / n for name, value in sums.items()})
    trained = [t for t, m in enumerate(columns.mask.tolist()) if m]
    named = (columns.logprobs, columns.old_logprobs, columns.rollout_logprobs)
    new, old, rollout = (column.detach().tolist() for column in named)
    before = new if old_is_rollout else old
    weights = [min(math.exp(before[t] - rollout[t]), cap or math.inf) for t in trained]
    assert metrics["mismatch/importance"] == pytest.approx(sum(weights) / n)
    assert metrics["mismatch/ess"] == pytest.approx(
        sum(weights) ** 2 / (n * sum(w * w for w in weights))
    )
    trainer_ppl = math.exp(-sum(new[t] for t in trained) / n)
    rollout_ppl = math.exp(-sum(rollout[t] for t in trained) / n)
    assert metrics["mismatch/ppl"] == pytest.approx(trainer_ppl)
    assert metrics["mismatch/rollout_ppl"] == pytest.approx(rollout_ppl)
    assert metrics["mismatch/ppl_ratio"] == pytest.approx(trainer_ppl / rollout_ppl)
    assert derived_metrics({}) == {}
