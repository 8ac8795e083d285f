from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from consumer.config.learner import LearnerConfig
from consumer.grpo.learner.advantages import grpo_advantages
from consumer.grpo.learner.train_controller import TrainController
from consumer.grpo.models.model_folder import load_model
from consumer.grpo.policy.policy import Policy
from consumer.grpo.policy.vocabulary_projection import LogitTransform, project
from tests.consumer.grpo.models.tiny import make_group, train_step

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"),
        ],
    ),
]


def make_learner(model_dir: Path, device: str, *, bf16: bool = True) -> Policy:
    return Policy(model_dir, LearnerConfig(learning_rate=1e-3, bf16=bf16), device=device, seed=7)


def make_batch(step: int) -> tuple[list[Any], Any]:
    groups = [make_group(100 * step + i, prompt=3 + i) for i in range(3)]
    return groups, grpo_advantages([group.scores for group in groups])


@pytest.mark.parametrize("device", DEVICES)
def test_parameters_and_optimizer_stay_float32_and_a_resume_is_exact(
    model_dir: Path, tmp_path: Path, device: str
) -> None:
    straight = make_learner(model_dir, device)
    train_step(straight, *make_batch(0))
    state = straight.state_tensors()
    kinds = {
        name: tensor.dtype
        for name, tensor in state.items()
        if name.startswith(("model/", "optimizer/"))
    }
    assert set(kinds.values()) == {torch.float32}
    assert any(name.startswith("optimizer/exp_avg/") for name in kinds)
    save_file(state, tmp_path / "state.safetensors")

    resumed = make_learner(model_dir, device)
    resumed.load_state_tensors(load_file(tmp_path / "state.safetensors"))
    assert train_step(resumed, *make_batch(1)) == train_step(straight, *make_batch(1))
    after = straight.state_tensors()
    again = resumed.state_tensors()
    assert all(torch.equal(tensor, again[name]) for name, tensor in after.items())


@pytest.mark.parametrize("device", DEVICES)
def test_logprobs_in_bfloat16_are_near_those_in_float32_but_not_the_same(
    model_dir: Path, device: str
) -> None:
    exact = make_learner(model_dir, device, bf16=False)
    rounded = make_learner(model_dir, device)
    (update,) = TrainController(exact).pack(make_batch(0)[0]).updates
    (batch,) = update.batches
    apart = (exact.logprobs(batch) - rounded.logprobs(batch)).abs()
    assert 1e-4 < apart.max() < 0.1
    assert rounded.logprobs(batch).dtype == torch.float32


@pytest.mark.parametrize("device", DEVICES)
def test_logits_in_float32_come_nearer_to_the_exact_logprobs(model_dir: Path, device: str) -> None:
    """Both are compared with the same states and factors, rounded to bfloat16."""
    states = torch.randn(50, 64, device=device) * 4
    head = torch.nn.Linear(64, 300, device=device)
    targets = torch.arange(50, device=device)
    rounded = head.weight.bfloat16().double(), head.bias.bfloat16().double()
    exact = torch.nn.functional.linear(states.bfloat16().double(), *rounded)
    exact = exact.log_softmax(-1).gather(1, targets[:, None]).squeeze(1)
    apart = []
    for fp32_logits in (False, True):
        with torch.autocast(device, torch.bfloat16):
            found = project(states, head, targets, LogitTransform(), fp32_logits=fp32_logits)
        apart.append(float((found.logprobs - exact).detach().abs().max()))
    assert apart[0] > 1e-3
    assert apart[1] < 1e-5


def test_tensors_that_transformers_keeps_in_float32_are_published_in_float32(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = make_learner(model_dir, "cpu")
    monkeypatch.setattr(learner.model, "_keep_in_fp32_modules_strict", {"norm"})
    learner.save_weights(tmp_path, to_publish=True)
    published = load_file(tmp_path / "model.safetensors")
    kinds = {"norm" in name: tensor.dtype for name, tensor in published.items()}
    assert kinds == {True: torch.float32, False: torch.bfloat16}


@pytest.mark.parametrize("device", DEVICES)
def test_published_weights_are_the_parameters_rounded_once(
    model_dir: Path, tmp_path: Path, device: str
) -> None:
    learner = make_learner(model_dir, device)
    train_step(learner, *make_batch(0))
    for name, to_publish in (("kept", False), ("published", True)):
        (tmp_path / name).mkdir()
        learner.save_weights(tmp_path / name, to_publish=to_publish)
    kept, published = (
        load_file(tmp_path / name / "model.safetensors") for name in ("kept", "published")
    )
    assert kept.keys() == published.keys()  # a tied head is stored in neither
    assert all(torch.equal(published[name], tensor.bfloat16()) for name, tensor in kept.items())
    assert load_model(tmp_path / "published", dtype=torch.bfloat16).dtype == torch.bfloat16
