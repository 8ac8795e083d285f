from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from buffer.wire.group import RolloutGroup
from consumer.config.learner import DistillationConfig, LearnerConfig, LossConfig
from consumer.grpo.learner.batch_filter import BatchFilter
from consumer.grpo.learner.distillation import Distillation
from consumer.grpo.learner.losses import Samples, TokenColumns, policy_loss
from consumer.grpo.learner.train_controller import TrainController
from consumer.grpo.policy.micro_batch import MicroBatch
from consumer.grpo.policy.policy import Policy
from tests.consumer.grpo.models.tiny import make_group, taught

STATES, WORDS, TOP = 4, 7, 3
WEIGHTS = {"task": {"big": 1.0, "small": 0.25}}
OPEN = LossConfig(importance_cap=None, clip_low=1.0, clip_high=1e6)
"""Nothing is clipped."""


def distributions(seed: int, count: int) -> list[Tensor]:
    """Return logits, float64[STATES, WORDS] each."""
    draw = np.random.default_rng(seed)
    return [torch.tensor(draw.normal(0, 1.5, (STATES, WORDS))) for _ in range(count)]


def finite_differences(function: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    gradient = torch.zeros_like(at)
    for place in np.ndindex(*at.shape):
        step = torch.zeros_like(at)
        step[place] = 1e-6
        gradient[place] = (function(at + step) - function(at - step)) / 2e-6
    return gradient


def kl(one: Tensor, other: Tensor) -> Tensor:
    """Return KL(one, other) of each row, of probabilities."""
    return (one * (one.log() - other.log())).sum(1)


def micro_batch(tokens: int, optional: dict[str, Tensor]) -> MicroBatch:
    """Return a micro-batch of one sample of `task`."""
    nothing = torch.zeros(tokens, dtype=torch.long)
    ones = torch.ones(tokens)
    return MicroBatch(
        *(nothing, nothing, nothing, nothing, ones, ones, nothing, nothing[:1]),
        trained_tokens=torch.tensor([float(tokens)]),
        optional=optional,
        tasks=["task"],
    )


def loss_of(
    columns: TokenColumns,
    batch: MicroBatch,
    weights: Tensor,
    others: Tensor | None = None,
    **section: Any,
) -> tuple[Tensor, dict[str, Tensor]]:
    hook = Distillation(DistillationConfig(**section), WEIGHTS, OPEN)
    return policy_loss(hook.apply(columns, batch, others), weights, OPEN)


@pytest.mark.parametrize("is_stale", [False, True])
def test_the_advantage_has_the_gradient_of_the_kl_to_the_teachers(is_stale: bool) -> None:
    """The expectation over the sampled token is exact: each word is a token with its chance.

    It holds for rollouts of other weights too, as the advantage has the present logprobs; and the
    metric is the KL.
    """
    logits, big, small, old = distributions(1, 4)
    big, small = big.log_softmax(1), small.log_softmax(1)
    sampling = (old if is_stale else logits).log_softmax(1)

    def expected(at: Tensor) -> Tensor:
        student = at.softmax(1)
        return (kl(student, big.exp()) + 0.25 * kl(student, small.exp())).sum()

    policy = logits.clone().requires_grad_()
    tokens = STATES * WORDS
    logprobs = policy.log_softmax(1).flatten()
    mask = torch.ones(tokens, dtype=torch.float64)
    rollout = sampling.flatten()
    columns = TokenColumns(
        logprobs=logprobs,
        old_logprobs=rollout,
        rollout_logprobs=rollout,
        advantages=torch.zeros(tokens, dtype=torch.float64),
        samples=Samples(mask, torch.zeros(tokens, dtype=torch.long), mask.sum()[None]),
        entropy=torch.zeros(tokens, dtype=torch.float64),
        old_is_rollout=True,
    )
    teachers = {"teacher_logprobs/big": big.flatten(), "teacher_logprobs/small": small.flatten()}
    batch = micro_batch(tokens, teachers)
    loss, _ = loss_of(columns, batch, sampling.exp().flatten(), clip=1e3)
    loss.backward()  # type: ignore[no-untyped-call]
    assert policy.grad is not None
    torch.testing.assert_close(
        policy.grad, finite_differences(expected, logits), rtol=1e-5, atol=1e-7
    )
    mean = 0.0
    for token, chance in enumerate(sampling.exp().flatten().tolist()):
        one = torch.zeros_like(mask).index_fill(0, torch.tensor([token]), 1.0)
        alone = replace(columns, samples=replace(columns.samples, mask=one))
        _, metrics = loss_of(alone, batch, mask)
        mean += chance * float(metrics["distill/reverse_kl"])
    assert mean == pytest.approx(expected(logits).item())


def coarse(distribution: Tensor, ids: Tensor, outside: str) -> Tensor:
    """Return the distribution over the top words and, in a bucket, the others."""
    top = distribution.gather(1, ids)
    if outside == "renormalise":
        return top / top.sum(1, keepdim=True)
    return torch.cat([top, 1 - top.sum(1, keepdim=True)], 1)


@pytest.mark.parametrize("outside", ["bucket", "renormalise"])
@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_the_loss_over_top_tokens_has_the_gradient_of_the_dense_kl(
    direction: str, outside: str
) -> None:
    """Two teachers; the first state has only one of them, the last state is not trained."""
    logits, *teachers = (x.log_softmax(1) for x in distributions(2, 3))
    tops = [teacher.topk(TOP + n, 1) for n, teacher in enumerate(teachers)]
    mask = torch.tensor([1.0, 1.0, 1.0, 0.0])

    def expected(at: Tensor, section_weight: float = 0.5) -> Tensor:
        student, total = at.softmax(1), torch.zeros(STATES)
        for n, (weight, teacher, top) in enumerate(zip((1.0, 0.25), teachers, tops, strict=True)):
            pair = [coarse(x, top.indices, outside) for x in (teacher.exp(), student)]
            own = kl(*(pair if direction == "forward" else pair[::-1]))
            own[0] *= n  # the first state has no value of the first teacher
            total = total + weight * own
        return section_weight * (mask * total).sum()

    policy = logits.clone().requires_grad_()
    columns = TokenColumns(
        *(torch.zeros(STATES, dtype=torch.float64),) * 4,
        samples=Samples(mask, torch.zeros(STATES, dtype=torch.long), mask.sum()[None]),
        entropy=torch.zeros(STATES, dtype=torch.float64),
    )
    given: dict[str, Tensor] = {}
    for name, top in zip(("big", "small"), tops, strict=True):
        given[f"teacher_top_ids/{name}"] = top.indices
        given[f"teacher_top_logprobs/{name}"] = top.values.clone()
    given["teacher_top_logprobs/big"][0] = torch.nan
    batch = micro_batch(STATES, given)
    ids = batch.other_ids()
    assert ids is not None
    others = policy.log_softmax(1).gather(1, ids)
    section = {"top_k_loss": direction, "outside": outside, "top_k_coef": 0.5}
    loss, metrics = loss_of(columns, batch, mask, others, coef=0, **section)
    loss.backward()  # type: ignore[no-untyped-call]
    assert policy.grad is not None
    assert loss.item() == pytest.approx(expected(logits).item())
    torch.testing.assert_close(
        policy.grad, finite_differences(expected, logits), rtol=1e-5, atol=1e-7
    )
    assert metrics["distill/top_coverage"] == 3
    assert metrics["distill/top_kl"].item() == pytest.approx(2 * loss.item())


def test_a_bound_keeps_the_direction_of_the_worst_tokens() -> None:
    logits, teacher = (x.log_softmax(1) for x in distributions(3, 2))
    top = teacher.topk(TOP, 1)
    batch = micro_batch(
        STATES,
        {
            "teacher_logprobs/big": torch.tensor([-1.0, -9.0, -3.0, torch.nan]),
            "teacher_top_ids/big": top.indices,
            "teacher_top_logprobs/big": top.values,
        },
    )
    gradients = []
    for clip in (1e3, 0.05):
        policy = logits.clone().requires_grad_()
        mask = torch.ones(STATES)
        columns = TokenColumns(
            *(torch.full((STATES,), -3.0, dtype=torch.float64),) * 4,
            samples=Samples(mask, torch.zeros(STATES, dtype=torch.long), mask.sum()[None]),
            entropy=torch.zeros(STATES),
        )
        others = policy.log_softmax(1).gather(1, top.indices)
        hook = Distillation(DistillationConfig(top_k_loss="forward", clip=clip), WEIGHTS, OPEN)
        taught = hook.apply(columns, batch, others)
        assert taught.extra_loss is not None
        gradients.append(torch.autograd.grad(taught.extra_loss.sum(), [policy])[0])
        expected = torch.tensor([2.0, -6.0, 0.0, 0.0]).clamp(-clip, clip)
        torch.testing.assert_close(taught.advantages.float() + 3, expected)
        assert taught.extra_metrics["distill/coverage"] == 3
        assert taught.extra_metrics["distill/reverse_kl"] == 4
        assert taught.extra_metrics["distill/clip_fraction"] == (0 if clip > 6 else 2)
    lengths = [gradient.norm(dim=1, keepdim=True) for gradient in gradients]
    assert (lengths[1] < lengths[0] * 0.9).all()
    torch.testing.assert_close(gradients[0] / lengths[0], gradients[1] / lengths[1])


# -- whole train steps ----------------------------------------------------------------------------


def make_controller(model_dir: Path, advantages: str = "grpo", **options: Any) -> TrainController:
    config = LearnerConfig.model_validate(
        {"learning_rate": 1e-2, "token_budget": 400, "distillation": {}} | options
    )
    return TrainController(
        Policy(model_dir, config, seed=7),
        advantages,
        teacher_weights=WEIGHTS,
        batch_filter=BatchFilter(needs_rewards=advantages != "none"),
    )


def batch_of(*groups: RolloutGroup, score: float | None = None) -> list[RolloutGroup]:
    made = []
    for group in groups:
        states = group.states
        for state in states:
            state.reward = None if score is None else {"score": score}
        made.append(RolloutGroup(group.gid, group.task, states))
    return made


def sampled_logprobs(learner: Policy, group: RolloutGroup) -> NDArray[np.float32]:
    found = [np.zeros(len(group.response_ids), np.float32)]
    [update] = TrainController(learner).pack([group]).updates
    update.batches.fill(found, [learner.logprobs(part) for part in update.batches])
    return found[0]


def sampled_by(model_dir: Path, group: RolloutGroup) -> RolloutGroup:
    group.columns["logprobs"] = sampled_logprobs(make_controller(model_dir).policy, group)
    return group


FULL: dict[str, Any] = {"distillation": {"top_k_loss": "reverse", "clip": 2.0}}


@pytest.mark.parametrize("objective", ["ppo", "cispo"])
def test_a_division_into_micro_batches_changes_nothing(model_dir: Path, objective: str) -> None:
    groups = [
        taught(make_group(1), "big", "small"),
        make_group(2),
        taught(make_group(3), "small", k=2),
    ]
    loss = {"objective": objective, "entropy_coef": 0.01}
    whole = make_controller(model_dir, loss=loss, **FULL)
    parts = make_controller(model_dir, loss=loss, token_budget=16, **FULL)
    for _ in range(2):
        one, other = (c.fit([g.continued(g.states) for g in groups]) for c in (whole, parts))
        assert other == pytest.approx(one, rel=1e-4, abs=1e-5)
    assert one["distill/coverage"] == pytest.approx(0.55, abs=0.25)
    assert one["distill/coverage/big"] < one["distill/coverage/small"]
    assert one["distill/top_kl"] > 0
    state = whole.state_tensors()
    for name, tensor in parts.state_tensors().items():
        torch.testing.assert_close(tensor, state[name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("advantages", "score"), [("none", None), ("grpo", 1.0)])
def test_groups_without_rewards_or_with_equal_ones_learn_from_their_teacher(
    model_dir: Path, advantages: str, score: float | None
) -> None:
    """The teacher finds the tokens of every second rollout likelier than the policy does."""
    controller = make_controller(model_dir, advantages)
    [bare] = [group] = batch_of(sampled_by(model_dir, make_group(1)), score=score)
    before = {name: p.detach().clone() for name, p in controller.policy.parameters.items()}
    found = controller.fit([bare])
    assert found["distill/coverage"] == 0
    assert all(torch.equal(before[n], p) for n, p in controller.policy.parameters.items())
    signs = np.repeat([1.0, -1.0, 1.0, -1.0], group.lengths).astype(np.float32)
    group.columns["teacher_logprobs/big"] = group.logprobs + signs
    found = controller.fit([group])
    assert found["distill/coverage"] == found["batch/trained_share"] == 1
    trained = group.mask > 0
    assert found["distill/reverse_kl"] == pytest.approx(-signs[trained].mean(), abs=1e-4)
    moved = (sampled_logprobs(controller.policy, group) - group.logprobs)[trained]
    assert (moved * signs[trained]).mean() > 0.05


def test_a_teachers_column_stands_in_for_the_reference_model(model_dir: Path) -> None:
    loss: dict[str, Any] = {"kl_coef": 0.5}
    own = make_controller(model_dir, distillation=None, loss=loss)
    group = make_group(1)
    reference = sampled_logprobs(own.policy, group)
    group.columns["teacher_logprobs/frozen"] = reference
    loss |= {"kl_reference": "frozen"}
    given = make_controller(model_dir, distillation=None, loss=loss)
    assert given.policy.reference is None
    for _ in range(3):
        expected = own.fit([group])
        assert given.fit([group]) == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert expected["policy/kl_ref"] > 0
    # with distillation, the reference is no teacher that the policy is drawn to
    assert make_controller(model_dir, loss=loss).fit([group])["distill/coverage"] == 0
