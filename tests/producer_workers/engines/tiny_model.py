"""Tiny random Qwen3 folders: a real architecture, real files, 150,000 random parameters."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

VOCABULARY = 320
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"]


def write_tiny_model(
    folder: Path,
    *,
    seed: int,
    hidden: int = 64,
    architecture: str = "qwen3",
    tied: bool = False,
    layers: int = 2,
    dense_layers: Sequence[int] = (),
) -> Path:
    """Save a model and its tokenizer to `folder`. Two seeds are two checkpoints of one model.

    `tied`: the output head is the embedding matrix, and no tensor of the file is named after it.
    `dense_layers`: those of a mixture of experts that have none.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder)
    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 32,
        "num_key_value_heads": 1,
        "head_dim": 32,  # vLLM's CPU attention has kernels for 32, 64, 128
        "max_position_embeddings": 4096,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "tie_word_embeddings": tied,
        "initializer_range": 0.4,  # far from uniform, so that wrong weights show in the logprobs
    }
    if architecture == "qwen3_moe":
        settings |= {
            "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
            "decoder_sparse_step": 1, "mlp_only_layers": list(dense_layers),
        }  # fmt: skip
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(architecture, **settings), dtype=torch.float32
    )
    model.save_pretrained(folder)
    return folder


def reference_logprobs(
    folder: Path, prompt: list[int], response: list[int], temperature: float = 1.0
) -> list[float]:
    """Logprobs of `response` after `prompt` by a plain transformers forward pass in float32.

    The stop token is left out of the distribution, as it was for a response whose min_tokens
    forbade it.
    """
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(torch.tensor([prompt + response])).logits[0] / temperature
    logits[:, model.config.eos_token_id] = -torch.inf
    logprobs = torch.log_softmax(logits, -1)
    return [float(logprobs[len(prompt) - 1 + place, token]) for place, token in enumerate(response)]


def reference_distribution(folder: Path, tokens: list[int]) -> NDArray[np.float32]:
    """Logprobs of all ids after each token, float32[tokens, V], by a plain forward pass."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logprobs: NDArray[np.float32] = torch.log_softmax(
            model(torch.tensor([tokens])).logits[0], -1
        ).numpy()
    return logprobs


def gates_choose(folder: Path, tokens: list[int], experts: NDArray[np.int16]) -> NDArray[np.bool_]:
    """Return whether `experts`, of the first tokens, are the best in a plain forward pass.

    bool[rows], by their logits, to 0.001: sums in another order decide between two that are as
    good. A layer without experts has zeros.
    """
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    config = model.config
    rows = len(experts)
    with torch.no_grad():
        logits = model(torch.tensor([tokens]), output_router_logits=True).router_logits
    right: NDArray[np.bool_] = (experts[:, config.mlp_only_layers] == 0).all((1, 2))
    sparse = [
        layer for layer in range(config.num_hidden_layers) if layer not in config.mlp_only_layers
    ]
    for layer, of_layer in zip(sparse, logits, strict=True):
        ranked = np.sort(of_layer[:rows].numpy())
        chosen = np.sort(experts[:, layer].astype(np.int64))
        least = np.take_along_axis(of_layer[:rows].numpy(), chosen, 1).min(1)
        right &= (np.diff(chosen) > 0).all(1) & (
            least >= ranked[:, -config.num_experts_per_tok] - 1e-3
        )
    return right


def allowed_logprobs(folder: Path, prompt: list[int], allowed: list[int]) -> list[float]:
    """Logprobs of the tokens that may come after `prompt`, where only these may."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(torch.tensor([prompt])).logits[0, -1, allowed]
    return [float(logprob) for logprob in torch.log_softmax(logits, -1)]


def make_tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        [f"{a} + {b} = {a + b}" for a in range(40) for b in range(40)], trainer
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|pad|>"
    )
