"""Compare advantages, losses and gradients with TRL's `GRPOTrainer`, where the formulas agree."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch

from consumer.config.learner import LossConfig, Outside
from consumer.grpo.learner.advantages import dr_grpo_advantages, grpo_advantages
from consumer.grpo.learner.distillation import top_k_kl
from consumer.grpo.learner.losses import Samples, TokenColumns, policy_loss, token_weights
from consumer.grpo.models.model_folder import load_model, load_tokenizer
from tests.consumer.grpo.models.tiny import build_model

LENGTHS = [4, 1, 6, 0, 3, 5]
"""Response tokens of six rollouts; the fourth has none. All tokens of the last are masked."""
LONGEST = max(LENGTHS)


pytestmark = pytest.mark.slow  # to import TRL takes six seconds


@pytest.fixture(scope="module")
def trl(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """TRL's trainer of a tiny model, whose forward pass returns what `columns` contains."""
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # it knows an older vLLM; imported here, since it takes seconds
        from datasets import Dataset
        from trl import GRPOConfig, GRPOTrainer
    folder = tmp_path_factory.mktemp("trl")
    model = build_model(folder)
    arguments = GRPOConfig(
        output_dir=str(folder),
        per_device_train_batch_size=len(LENGTHS),
        num_generations=len(LENGTHS),
        max_completion_length=LONGEST,
        use_cpu=True,
        bf16=False,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=load_model(model),
        processing_class=load_tokenizer(model),
        reward_funcs=lambda completions, score, **_: score,
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": ["x"] * len(LENGTHS)}),
    )
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (*trainer.columns, None)
    return trainer


def rows(seed: int) -> dict[str, torch.Tensor]:
    """float64[B, T] of each column, a mask with holes, and an advantage for each row."""
    draw = np.random.default_rng(seed)
    shape = (len(LENGTHS), LONGEST)
    found = {
        name: torch.tensor(draw.uniform(-3, -0.05, shape))
        for name in ("logprobs", "old", "rollout", "reference")
    }
    mask = (np.arange(LONGEST) < np.array(LENGTHS)[:, None]) & (draw.random(shape) > 0.2)
    mask[-1] = False
    mask[0, 0] = True
    found |= {
        "mask": torch.tensor(mask.astype(float)),
        "entropy": torch.tensor(draw.uniform(0, 2, shape)),
    }
    return found | {"advantages": torch.tensor(draw.normal(size=len(LENGTHS)))}


def correction(trl: Any, table: dict[str, torch.Tensor]) -> torch.Tensor:
    """Compute it as TRL's `_generate_and_score_completions` does, from old and engine logprobs."""
    difference = (table["old"] - table["rollout"]) * table["mask"]
    if trl.vllm_importance_sampling_mode.startswith("sequence"):
        difference = difference.sum(-1, keepdim=True)
    ratio = difference.exp()
    low = trl.vllm_importance_sampling_clip_min
    high = trl.vllm_importance_sampling_clip_max
    if trl.vllm_importance_sampling_mode.endswith("truncate"):
        return ratio.clamp(low, high)
    return ratio.masked_fill((ratio < (low or 0.0)) | (ratio > high), 0.0)


def theirs(trl: Any, table: dict[str, torch.Tensor]) -> tuple[float, torch.Tensor]:
    logprobs = table["logprobs"].clone().requires_grad_()
    trl.columns = logprobs, table["entropy"]
    ones = torch.ones(len(LENGTHS), 1, dtype=torch.long)
    inputs = {
        "prompt_ids": ones,
        "prompt_mask": ones,
        "completion_ids": torch.zeros(table["mask"].shape, dtype=torch.long),
        "completion_mask": table["mask"],
        "advantages": table["advantages"],
        "old_per_token_logps": table["old"],
        "ref_per_token_logps": table["reference"],
        "importance_sampling_ratio": correction(trl, table),
        "sampling_per_token_logps": table["rollout"],
        "num_items_in_batch": table["mask"].sum(),
    }
    loss = trl._compute_loss(trl.model, inputs)
    loss.backward()
    assert logprobs.grad is not None
    return loss.item(), logprobs.grad


def ours(config: LossConfig, table: dict[str, torch.Tensor]) -> tuple[float, torch.Tensor]:
    logprobs = table["logprobs"].clone().requires_grad_()
    owner = torch.arange(len(LENGTHS)).repeat_interleave(LONGEST)
    samples = Samples(table["mask"].flatten(), owner, table["mask"].sum(1))
    columns = TokenColumns(
        logprobs=logprobs.flatten(),
        old_logprobs=table["old"].flatten(),
        rollout_logprobs=table["rollout"].flatten(),
        advantages=table["advantages"][owner],
        samples=samples,
        entropy=table["entropy"].flatten(),
        ref_logprobs=table["reference"].flatten() if config.kl_coef else None,
    )
    tokens = float(table["mask"].sum())
    weights = token_weights(samples, config, batch_tokens=tokens, batch_samples=len(LENGTHS))
    loss, _ = policy_loss(columns, weights, config)
    loss.backward()  # type: ignore[no-untyped-call]
    assert logprobs.grad is not None
    return loss.item(), logprobs.grad


TIS = {
    "use_vllm": True,
    "vllm_importance_sampling_mode": "token_truncate",
    "vllm_importance_sampling_clip_max": 1.5,
}
SAME: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "grpo": ({"loss_type": "grpo"}, {"aggregation": "sequence_mean"}),
    "dr_grpo": ({"loss_type": "dr_grpo"}, {"aggregation": "fixed_length", "max_tokens": LONGEST}),
    "bnpo": ({"loss_type": "bnpo"}, {}),
    "dapo": ({"loss_type": "dapo", "epsilon_high": 0.5}, {"clip_high": 0.5}),
    "cispo": (
        {"loss_type": "cispo", "epsilon_high": 1.4},
        {"objective": "cispo", "clip_low": 1.0, "clip_high": 0.4},
    ),
    "gspo": (
        {
            "loss_type": "grpo",
            "importance_sampling_level": "sequence",
            "epsilon_low": 0.1,
            "epsilon_high": 0.1,
        },
        {"objective": "gspo", "aggregation": "sequence_mean", "clip_low": 0.1, "clip_high": 0.1},
    ),
    "sapo": ({"loss_type": "sapo"}, {"objective": "sapo", "aggregation": "sequence_mean"}),
    "off-policy mask": (
        {"loss_type": "dapo", "off_policy_mask_threshold": 0.1, "beta": 0.1},
        {"off_policy_mask": 0.1, "kl_coef": 0.1},
    ),
    "dual clip": (
        {"loss_type": "grpo", "delta": 2.0},
        {"aggregation": "sequence_mean", "dual_clip": 2.0},
    ),
    "k3": ({"loss_type": "grpo", "beta": 0.3}, {"aggregation": "sequence_mean", "kl_coef": 0.3}),
    "entropy": (
        {"loss_type": "dapo", "_entropy_bonus_enabled": True, "entropy_coef": 0.1},
        {"entropy_coef": 0.1},
    ),
    "token truncate": ({"loss_type": "dapo", **TIS}, {"importance_cap": 1.5}),
    "token mask": (
        {"loss_type": "dapo", **TIS, "vllm_importance_sampling_mode": "token_mask"},
        {"importance_cap": 1.5, "importance_mode": "mask"},
    ),
    "sequence truncate": (
        {"loss_type": "grpo", **TIS, "vllm_importance_sampling_mode": "sequence_truncate"},
        {"aggregation": "sequence_mean", "importance_cap": 1.5, "importance_level": "sequence"},
    ),
    "sequence mask": (
        {"loss_type": "grpo", **TIS, "vllm_importance_sampling_mode": "sequence_mask"},
        {"aggregation": "sequence_mean", "importance_cap": 1.5, "importance_level": "sequence"}
        | {"importance_mode": "mask"},
    ),
}
PLAIN = {
    "epsilon_low": 0.2, "epsilon_high": 0.28, "beta": 0.0, "importance_sampling_level": "token",
    "use_vllm": False, "vllm_importance_sampling_correction": True,
    "vllm_importance_sampling_clip_min": None, "_entropy_bonus_enabled": False,
    "off_policy_mask_threshold": None, "use_adaptive_entropy": False,
    "current_gradient_accumulation_steps": 1, "max_completion_length": LONGEST,
}  # fmt: skip


@pytest.mark.parametrize("name", SAME)
def test_loss_and_gradient_are_those_of_trl(
    trl: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, options = SAME[name]
    settings = PLAIN | settings
    monkeypatch.setattr(trl.args, "delta", settings.pop("delta", None))
    monkeypatch.setattr(trl.args, "use_bias_correction_kl", True)
    for setting, value in settings.items():
        monkeypatch.setattr(trl, setting, value, raising=False)
    config = LossConfig(**{"importance_cap": None} | options)
    for seed in range(5):
        table = rows(seed)
        (their_loss, their_gradient), (our_loss, our_gradient) = (
            theirs(trl, table),
            ours(config, table),
        )
        assert our_loss == pytest.approx(their_loss, rel=1e-5, abs=1e-7)
        torch.testing.assert_close(our_gradient, their_gradient, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "scores", [[0.0, 1.0, 1.0, 0.5, -2.0, 1.0], [0.3] * 6, [0.0, 0.0, 0.0, 0.0, 0.0, 1.0]], ids=str
)
@pytest.mark.parametrize("scale", ["group", "none"])
def test_advantages_are_those_of_trl(
    trl: Any, scores: list[float], scale: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For equal scores, whose mean may differ from them in the last bit, ours are exactly 0."""

    def rollouts(prompts: list[Any], *_: Any) -> dict[str, Any]:
        ids = [[7] * max(length, 1) for length in LENGTHS]
        return {
            "prompt_ids": [[6]] * len(LENGTHS),
            "completion_ids": ids,
            "logprobs": None,
            "score": scores,
        }

    monkeypatch.setattr(trl, "rollout_func", rollouts, raising=False)
    monkeypatch.setattr(trl, "scale_rewards", scale)
    trl.columns = (torch.zeros(len(LENGTHS), LONGEST),) * 2
    their = trl._generate_and_score_completions([{"prompt": "x"} for _ in LENGTHS])["advantages"]
    column = [np.array(scores, np.float32)]
    our = grpo_advantages(column) if scale == "group" else dr_grpo_advantages(column)
    np.testing.assert_allclose(
        our, their.numpy(), rtol=1e-5, atol=1e-3 if len(set(scores)) == 1 else 1e-6
    )
    if len(set(scores)) == 1:
        assert not our.any()


@pytest.mark.parametrize("outside", ["bucket", "renormalise"])
@pytest.mark.parametrize("reverse", [False, True])
def test_the_loss_over_top_tokens_is_that_of_trl(outside: Outside, reverse: bool) -> None:
    """Of its distillation from a server; over all words also that of GKD."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from trl.experimental.gkd import GKDTrainer
        from trl.experimental.server_distillation import server_distillation_trainer as server

    draw = np.random.default_rng(1)
    student, teacher = (
        torch.tensor(draw.normal(0, 2, (10, 9))).log_softmax(1).requires_grad_() for _ in range(2)
    )
    for k in (3, 9):
        logprobs, ids = teacher.detach().topk(k, 1)
        own = student.gather(1, ids)
        ours = top_k_kl(own, logprobs, reverse=reverse, outside=outside)
        everywhere = torch.ones_like(ids, dtype=torch.bool)
        if outside == "bucket":
            pair = [server._add_tail_bucket(x, everywhere)[0] for x in (own, logprobs)]
        else:
            pair = [x.log_softmax(1) for x in (own, logprobs)]
        mask = torch.ones_like(pair[0], dtype=torch.bool)
        theirs = server._jsd_divergence(*pair, float(reverse), mask).sum(1)
        if k == 9:
            labels = torch.zeros(1, 10, dtype=torch.long)
            whole = GKDTrainer.generalized_jsd_loss(
                student[None], teacher[None].detach(), labels, float(reverse), 1.0, "sum"
            )
            torch.testing.assert_close(ours.sum(), whole, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
        gradients = [
            torch.autograd.grad(loss.sum(), student, retain_graph=True)[0]
            for loss in (ours, theirs)
        ]
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)
