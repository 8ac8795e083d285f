"""A LoRA adapter in the learner.

It alone is trained and saved, has no effect when it is off, and is tied to its model.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import orjson
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from buffer.errors import ModelError
from buffer.weights.safetensors_files import BASE_CHECKSUM, PEFT_PREFIX, model_checksum
from consumer.config.learner import LearnerConfig, LoraConfig, LossConfig
from consumer.grpo.learner.train_controller import TrainController
from consumer.grpo.policy.policy import Policy
from rolloutmq.config.config import Config
from tests.consumer.grpo.learner.test_learner import make_batch
from tests.consumer.grpo.models.tiny import build_model, set_advantages, train_step

LORA = LoraConfig(rank=4, alpha=8)


def make_learner(model_dir: Path, lora: LoraConfig | None = LORA, **options: Any) -> Policy:
    loss = LossConfig(kl_coef=0.1)
    return Policy(
        model_dir, LearnerConfig(learning_rate=1e-2, lora=lora, loss=loss, **options), seed=7
    )


def merged(model_dir: Path, adapter: Path, folder: Path) -> Path:
    """Return the model with the adapter merged by hand: W + alpha / rank * B @ A."""
    shutil.copytree(model_dir, folder)
    weights = load_file(folder / "model.safetensors")
    tensors = load_file(adapter / "adapter_model.safetensors")
    config = orjson.loads((adapter / "adapter_config.json").read_bytes())
    for name in [name for name in tensors if ".lora_A." in name]:
        low = tensors[name].float()
        high = tensors[name.replace(".lora_A.", ".lora_B.")].float()
        layer = name.removeprefix(PEFT_PREFIX).replace(".lora_A.weight", ".weight")
        weights[layer] = weights[layer] + config["lora_alpha"] / config["r"] * high @ low
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_only_the_adapter_is_trained_and_its_files_say_what_the_model_became(
    model_dir: Path, tmp_path: Path
) -> None:
    learner = make_learner(model_dir)
    for step in range(3):
        train_step(learner, *make_batch(step))
    assert all(".lora_" in name for name in learner.parameters)
    start = load_file(model_dir / "model.safetensors")
    frozen = {
        name.replace(".base_layer", ""): p
        for name, p in learner.model.named_parameters()
        if not p.requires_grad
    }
    assert start.keys() == frozen.keys()
    assert all(torch.equal(start[name], parameter) for name, parameter in frozen.items())

    learner.save_weights(tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    with safe_open(tmp_path / "adapter_model.safetensors", "pt") as file:
        assert file.metadata()[BASE_CHECKSUM] == model_checksum(model_dir)
    plain = make_learner(merged(model_dir, tmp_path, tmp_path / "merged"), lora=None)
    part = TrainController(plain).pack(make_batch(9)[0]).updates[0].batches[0]
    torch.testing.assert_close(plain.logprobs(part), learner.logprobs(part), atol=1e-5, rtol=0)
    assert (
        make_learner(model_dir, lora=None).logprobs(part) - learner.logprobs(part)
    ).abs().max() > 1e-2


def test_the_reference_of_a_kl_term_is_the_model_with_its_adapter_off(model_dir: Path) -> None:
    learner = make_learner(model_dir)
    other = TrainController(make_learner(model_dir))
    plain = make_learner(model_dir, lora=None)
    assert learner.reference is not None
    for step in range(3):
        groups, advantages = make_batch(step)
        metrics = train_step(learner, groups, advantages)
        batch = other.pack(groups, keep=other.keep(advantages))
        set_advantages(batch, advantages)
        assert metrics == other.train(other.compute_ref_logprobs(batch))
        for update in batch.updates:
            for part, logprobs in zip(update.batches, update.ref_logprobs, strict=True):
                assert torch.equal(plain.logprobs(part), logprobs)
    assert metrics["policy/kl_ref"] > 1e-3
    assert all(
        torch.equal(tensor, other.policy.state_tensors()[name])
        for name, tensor in learner.state_tensors().items()
    )


def test_with_bf16_the_frozen_model_is_held_in_bfloat16_and_the_adapter_in_float32(
    model_dir: Path, tmp_path: Path
) -> None:
    learner = make_learner(model_dir, bf16=True)
    before = learner.state_tensors()
    metrics = train_step(learner, *make_batch(0))
    kinds = {
        parameter.dtype
        for name, parameter in learner.model.named_parameters()
        if ".lora_" not in name
    }
    assert kinds == {torch.bfloat16}
    assert {parameter.dtype for parameter in learner.parameters.values()} == {torch.float32}
    assert metrics["optim/grad_norm"] > 0
    assert any(
        not torch.equal(before[name], tensor) for name, tensor in learner.state_tensors().items()
    )
    learner.save_weights(tmp_path, to_publish=True)
    assert {t.dtype for t in load_file(tmp_path / "adapter_model.safetensors").values()} == {
        torch.bfloat16
    }


def test_what_does_not_fit_is_refused_by_name(model_dir: Path, tmp_path: Path) -> None:
    state = make_learner(model_dir).state_tensors()
    with pytest.raises(ModelError, match="trained with another model"):
        make_learner(build_model(tmp_path, seed=1)).load_state_tensors(state)
    with pytest.raises(ModelError, match="trained with alpha = 8"):
        make_learner(model_dir, LORA.model_copy(update={"alpha": 4.0})).load_state_tensors(state)
    for lora in (LORA.model_copy(update={"rank": 8}), None):
        with pytest.raises(ModelError, match="of another model"):
            make_learner(model_dir, lora).load_state_tensors(state)
    with pytest.raises(
        ModelError, match="no linear layers named lm_head, q for an adapter"
    ) as caught:
        make_learner(model_dir, LoraConfig(target_modules=("lm_head", "q", "q_proj")))
    assert "v_proj" in caught.value.hint


URL = "http://127.0.0.1:8000"


@pytest.mark.parametrize(
    ("engine", "lora", "loop", "problem"),
    [
        ({"kind": "vllm"}, {}, None, "needs .engine. max_lora_rank"),
        ({"kind": "vllm", "max_lora_rank": 8}, {}, None, "needs .engine. max_lora_rank"),
        ({"kind": "vllm", "max_lora_rank": 8}, None, None, "none are published"),
        ({"kind": "http", "url": URL}, {}, None, 'weights = "adapters"'),
        ({"kind": "http", "url": URL, "weights": "adapters"}, None, None, "none are published"),
        ({"kind": "http", "url": URL, "weights": "adapters"}, {}, None, ""),
        ({"kind": "vllm", "max_lora_rank": 8}, None, "mine:train", ""),
        ({"kind": "vllm", "max_lora_rank": 16}, {}, None, ""),
        ({"kind": "simulated"}, {}, None, ""),
    ],
)
def test_a_config_in_which_the_engine_wants_something_else_is_refused(
    engine: dict[str, Any], lora: dict[str, Any] | None, loop: str | None, problem: str
) -> None:
    task = {"judge": "exact_match", "dataset": {"kind": "jsonl", "path": "problems.jsonl"}}
    tree = {
        "run": {"name": "x"},
        "tasks": {"math": task},
        "engine": engine,
        "trainer": {"loop": loop},
    }
    tree["learner"] = {"lora": lora}
    if not problem:
        Config.model_validate(tree)
        return
    with pytest.raises(ValueError, match=problem):
        Config.model_validate(tree)
