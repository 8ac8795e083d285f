from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from buffer.errors import ConfigError, ModelError
from consumer.config.learner import LearnerConfig
from consumer.grpo.policy.logprobs import TargetLogits, token_logprobs
from consumer.grpo.policy.micro_batch import Packer
from consumer.grpo.policy.model_checks import check_logprobs, keeps_samples_apart
from consumer.grpo.policy.policy import Policy
from consumer.handle.batch import BatchTable
from tests.consumer.grpo.models.tiny import build_model, make_group
from tests.consumer.handle.test_ranks import build_mixture

TINY = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
HEADS_OF_8 = TINY | {"head_dim": 8}
MOE = HEADS_OF_8 | {
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
MLA = MOE | {
    "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 8, "num_key_value_heads": 4,
}  # fmt: skip
del MLA["head_dim"]

ARCHITECTURES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "phi", "phi3", "stablelm", "starcoder2"), TINY),
    **dict.fromkeys(("olmo2", "olmo3", "smollm3", "ernie4_5", "exaone4", "nemotron"), TINY),
    **dict.fromkeys(("qwen3", "gemma", "glm4", "seed_oss", "hunyuan_v1_dense"), HEADS_OF_8),
    **dict.fromkeys(("mixtral", "qwen3_moe", "glm4_moe", "gpt_oss", "olmoe"), MOE),
    **dict.fromkeys(("gpt2", "gpt_neox", "gpt_bigcode", "opt", "bloom", "lfm2"), TINY),
    "deepseek_v3": MLA,
    "mamba": TINY,
    # what follows scales or caps its logits
    "gemma2": HEADS_OF_8 | {"final_logit_softcapping": 2.0},
    "gemma3_text": HEADS_OF_8 | {"final_logit_softcapping": 2.0},
    "vaultgemma": HEADS_OF_8 | {"final_logit_softcapping": 2.0},
    "nanochat": TINY | {"final_logit_softcapping": 2.0},
    "recurrent_gemma": TINY | {"logits_soft_cap": 2.0},
    "granite": TINY | {"logits_scaling": 8.0},
    "granitemoe": MOE | {"logits_scaling": 6.0},
    "hyperclovax": TINY | {"logits_scaling": 0.25},
    "minicpm3": MLA | {"dim_model_base": 8},
    "cohere": TINY,
    "cohere2": TINY,
    "falcon_h1": TINY
    | {"lm_head_multiplier": 0.2, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8},
}


def build(name: str, **changes: Any) -> PreTrainedModel:
    """Return a tiny random model of an architecture, with logits far from uniform."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING[name](**ARCHITECTURES.get(name, TINY) | changes)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


@torch.no_grad()
def by_the_model_itself(model: PreTrainedModel, prompt: Tensor, response: Tensor) -> Tensor:
    ids = torch.cat([prompt, response])[None]
    distribution = model(input_ids=ids, use_cache=False).logits[0].float().log_softmax(-1)
    before = distribution[len(prompt) - 1 : -1]
    logprobs: Tensor = before.gather(1, response[:, None]).squeeze(1)
    return logprobs


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logprobs_of_packed_samples_are_the_models_own(name: str) -> None:
    model = build(name)
    policy = TargetLogits(model)
    check_logprobs(policy)
    group = make_group(1, prompt=5, lengths=[9, 2, 3])
    packer = Packer(200, share_rows=keeps_samples_apart(policy))
    (batch,) = packer.pack_pad_dispatch(BatchTable.of([group]))
    with torch.no_grad():
        logprobs = token_logprobs(policy, batch).logprobs
    for sample, rollout in enumerate(batch.rollout.tolist()):
        state = group.states[rollout]
        ids = (torch.tensor(column).long() for column in (state.prompt_ids, state.response_ids))
        own = by_the_model_itself(model, *ids)
        torch.testing.assert_close(logprobs[batch.sample == sample], own, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["bert", "modernbert-decoder", "llama4_text"])
def test_a_model_whose_logits_cannot_be_computed_is_refused_with_the_reason(
    name: str, tmp_path: Path
) -> None:
    """The first two transform hidden states behind their body; the third has no body of its own."""
    changes = {"is_decoder": True} if name == "bert" else {}
    build(name, **changes).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"log-probabilities of \w+ cannot be computed"):
        Policy(tmp_path, LearnerConfig())


def test_a_mixture_of_experts_is_not_compiled(tmp_path: Path) -> None:
    model = build_mixture(tmp_path / "mixture")
    with pytest.raises(ConfigError, match="mixture of experts"):
        Policy(model, LearnerConfig(compile=True))


def test_without_a_compiler_a_learner_says_what_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ConfigError, match=r"compile = true needs .* none of g\+\+"):
        Policy(build_model(tmp_path), LearnerConfig(compile=True))
