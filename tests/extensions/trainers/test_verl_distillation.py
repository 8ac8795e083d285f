from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("verl")

from consumer.config.learner import DistillationConfig, LossConfig
from consumer.grpo.learner.distillation import Distillation, top_k_kl
from consumer.grpo.learner.losses import Samples, TokenColumns, policy_loss
from consumer.grpo.policy.micro_batch import MicroBatch

TOKENS, WORDS = 12, 9


def rows(seed: int, count: int) -> list[torch.Tensor]:
    draw = np.random.default_rng(seed)
    return [torch.tensor(draw.uniform(-6, -0.05, TOKENS)) for _ in range(count)]


def test_the_policy_gradient_of_the_reverse_kl_is_that_of_verl() -> None:
    """verl: use_policy_gradient, loss_mode k1, loss_max_clamp."""
    from verl.trainer.ppo.core_algos import get_policy_loss_fn, kl_penalty
    from verl.workers.config import DistillationConfig as TheirConfig
    from verl.workers.config import DistillationLossConfig as TheirLoss

    settings: Any = TheirConfig(distillation_loss=TheirLoss(loss_mode="k1", loss_max_clamp=2.0))
    options = settings.distillation_loss
    config = LossConfig(importance_cap=None, clip_high=options.clip_ratio_high, dual_clip=3.0)
    for seed in range(5):
        current, sampled, teacher = rows(seed, 3)
        mask = torch.tensor(np.random.default_rng(seed).random(TOKENS) > 0.2).double()
        theirs = current.clone().requires_grad_()
        gap = kl_penalty(theirs, teacher, options.loss_mode)
        bounded = gap.clamp(min=-options.loss_max_clamp, max=options.loss_max_clamp)
        their_loss, _ = get_policy_loss_fn(options.policy_loss_mode)(
            old_log_prob=sampled[None],
            log_prob=theirs[None],
            advantages=-bounded.detach()[None],
            response_mask=mask[None],
            loss_agg_mode="token-mean",
            config=options,
        )
        their_loss.backward()

        ours = current.clone().requires_grad_()
        one = torch.zeros(TOKENS, dtype=torch.long)
        samples = Samples(mask, one, mask.sum()[None])
        zeros = torch.zeros(TOKENS, dtype=torch.float64)
        columns = TokenColumns(ours, sampled, sampled, zeros, samples, zeros, old_is_rollout=True)
        batch = MicroBatch(
            *(one, one, one, one, sampled, mask, one, one[:1], mask.sum()[None]),
            optional={"teacher_logprobs/big": teacher},
            tasks=["task"],
        )
        hook = Distillation(DistillationConfig(clip=2.0), {}, config)
        loss, _ = policy_loss(hook.apply(columns, batch, None), mask / mask.sum(), config)
        loss.backward()  # type: ignore[no-untyped-call]
        assert loss.item() == pytest.approx(their_loss.item(), rel=1e-6)
        assert theirs.grad is not None
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_the_loss_over_all_words_is_that_of_verl() -> None:
    """verl: forward_kl_topk, neither renormalised nor with a bucket: equal where k is all words."""
    from verl.trainer.distillation.fsdp.losses import compute_forward_kl_topk
    from verl.workers.config import DistillationConfig as TheirConfig
    from verl.workers.config import DistillationLossConfig as TheirLoss

    draw = np.random.default_rng(3)
    logits, other = (torch.tensor(draw.normal(0, 2, (TOKENS, WORDS))) for _ in range(2))
    teacher, ids = other.log_softmax(1).sort(1, descending=True)
    loss = TheirLoss(loss_mode="forward_kl_topk", use_policy_gradient=False)
    theirs, ours = (logits.float().clone().requires_grad_() for _ in range(2))
    found = compute_forward_kl_topk(
        theirs[None],
        torch.nested.nested_tensor([teacher.float()], layout=torch.jagged),
        torch.nested.nested_tensor([ids], layout=torch.jagged),
        TheirConfig(distillation_loss=loss),
        "thd",
    )["distillation_losses"][0]
    found.sum().backward()
    student = ours.log_softmax(1).gather(1, ids)
    own = top_k_kl(student, teacher.float(), reverse=False, outside="renormalise")
    own.sum().backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(own, found, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5)
