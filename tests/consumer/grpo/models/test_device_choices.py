from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import varlen
from torch.nn.functional import scaled_dot_product_attention
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from buffer.errors import ConfigError
from consumer.config.learner import Attention, LearnerConfig
from consumer.grpo.learner.train_controller import TrainController
from consumer.grpo.models import device_choices
from consumer.grpo.models.device_choices import choose_attention
from consumer.grpo.models.model_folder import load_model
from consumer.grpo.models.varlen_attention import TORCH_VARLEN
from consumer.grpo.policy.logprobs import TargetLogits, token_logprobs
from consumer.grpo.policy.micro_batch import Packer
from consumer.grpo.policy.model_checks import keeps_samples_apart
from consumer.grpo.policy.policy import Policy
from consumer.handle.batch import BatchTable
from tests.consumer.grpo.models.tiny import make_group

MODELS: dict[str, tuple[Any, Any]] = {
    "qwen3": (Qwen3ForCausalLM, Qwen3Config()),
    "gemma2": (Gemma2ForCausalLM, Gemma2Config()),
    "deepseek": (DeepseekV3ForCausalLM, DeepseekV3Config()),
    "gpt_oss": (GptOssForCausalLM, GptOssConfig()),
}
TINY = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip


@pytest.mark.parametrize(
    ("model", "device", "bf16", "installed", "chosen"),
    [
        ("qwen3", "cpu", False, "all", "sdpa"),
        ("qwen3", "cpu", True, "all", "sdpa"),
        ("qwen3", "cuda", True, "all", "flash_attention_3"),
        ("qwen3", "cuda", True, "flash_attention_2", "flash_attention_2"),
        ("qwen3", "cuda", True, "none", "torch_varlen"),
        ("qwen3", "cuda", False, "all", "sdpa"),
        ("gemma2", "cuda", True, "none", "sdpa"),  # its attention has a cap
        ("deepseek", "cuda", True, "none", "sdpa"),  # its values are narrower than its keys
        ("gpt_oss", "cpu", False, "all", "eager"),  # it refuses sdpa: attention sinks
        ("gpt_oss", "cuda", True, "all", "flex_attention"),
    ],
)
def test_auto_chooses_the_best_attention_that_can_run(
    monkeypatch: pytest.MonkeyPatch,
    model: str,
    device: str,
    bf16: bool,
    installed: str,
    chosen: Attention,
) -> None:
    monkeypatch.setattr(device_choices, "_architecture", lambda folder: MODELS[model])
    monkeypatch.setattr(
        device_choices,
        "PACKAGES",
        {
            name: (package, lambda name=name: installed in ("all", name))
            for name, (package, _) in device_choices.PACKAGES.items()
        },
    )
    place = torch.device(device)
    folder = Path()
    assert choose_attention(LearnerConfig(), folder, place, bf16=bf16) == chosen
    named = LearnerConfig(attn_implementation=chosen)
    assert choose_attention(named, folder, place, bf16=bf16) == chosen


def test_an_attention_that_cannot_run_is_refused_with_the_reason(model_dir: Path) -> None:
    with pytest.raises(ConfigError, match="torch_varlen: it needs a CUDA device"):
        Policy(model_dir, LearnerConfig(attn_implementation="torch_varlen", bf16=True))


def test_gpt_oss_loads_and_keeps_its_samples_apart(tmp_path: Path) -> None:
    config = GptOssConfig(**TINY, num_local_experts=4, num_experts_per_tok=2)
    torch.manual_seed(0)
    GptOssForCausalLM(config).save_pretrained(tmp_path)
    learner = Policy(tmp_path, LearnerConfig())
    groups = [make_group(0, prompt=3, lengths=[9, 2, 2])]
    (update,) = TrainController(learner).pack(groups).updates
    # its mask does not see where positions start again
    assert all(len(batch.rollout) == len(batch.input_ids) for batch in update.batches)


def reference_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    borders: Tensor,
    key_borders: Tensor,
    longest: int,
    longest_key: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> Tensor:
    """Return what torch's kernel returns on a GPU, sample by sample with torch's own attention."""
    assert torch.equal(borders, key_borders)
    assert int(borders.diff().max()) == longest == longest_key
    out = []
    for start, end in zip(borders[:-1].tolist(), borders[1:].tolist(), strict=True):
        q, k, v = (x[start:end].transpose(0, 1)[None] for x in (query, key, value))
        near = torch.ones(end - start, end - start, dtype=torch.bool).tril()
        if window_size[0] >= 0:
            near = near.triu(-window_size[0])
        mixed = scaled_dot_product_attention(
            q, k, v, attn_mask=near, scale=scale, enable_gqa=enable_gqa
        )
        out.append(mixed[0].transpose(0, 1))
    return torch.cat(out)


@pytest.mark.parametrize("kind", ["qwen3", "sliding"])
def test_torch_varlen_gives_the_logprobs_of_sdpa_without_a_mask(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str
) -> None:
    """The kernel itself runs on a GPU only: here the reference above is in its place."""
    monkeypatch.setattr(varlen, "varlen_attn", reference_varlen)
    torch.manual_seed(0)
    model: Any = (
        Qwen3ForCausalLM(Qwen3Config(**TINY))
        if kind == "qwen3"
        else MistralForCausalLM(MistralConfig(**TINY, sliding_window=4))
    )
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(tmp_path)
    group = make_group(0, prompt=2, lengths=[9, 2, 1, 5])
    (batch,) = Packer(1000).pack_pad_dispatch(BatchTable.of([group]))
    assert batch.input_ids.shape[0] < len(batch.rollout)
    policies = [
        TargetLogits(load_model(tmp_path, attention=name).eval()) for name in ("sdpa", TORCH_VARLEN)
    ]
    assert [policy.is_varlen for policy in policies] == [False, True]
    assert keeps_samples_apart(policies[1])
    by_mask, by_borders = (token_logprobs(policy, batch).logprobs for policy in policies)
    torch.testing.assert_close(by_borders, by_mask, atol=2e-5, rtol=1e-4)


def test_threads_that_load_at_once_all_get_a_whole_model(model_dir: Path) -> None:
    with ThreadPoolExecutor(4) as threads:
        models = list(threads.map(load_model, [model_dir] * 12))
    assert not any(parameter.is_meta for model in models for parameter in model.parameters())
