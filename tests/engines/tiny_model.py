"""Tiny random Qwen3 folders: a real architecture, real files, 150,000 random parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

VOCABULARY = 320
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"]


def write_tiny_model(
    folder: Path, *, seed: int, hidden: int = 64, architecture: str = "qwen3", tied: bool = False
) -> Path:
    """Save a model and its tokenizer to `folder`. Two seeds are two checkpoints of one model.

    `tied`: the output head is the embedding matrix, and no tensor of the file is named after it.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = _tokenizer()
    tokenizer.save_pretrained(folder)
    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": 2,
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
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, **settings), dtype=torch.float32)
    model.save_pretrained(folder)
    return folder


def reference_logprobs(folder: Path, prompt: list[int], response: list[int], temperature: float = 1.0) -> list[float]:
    """Logprobs of `response` after `prompt` by a plain transformers forward pass in float32.

    The stop token is left out of the distribution, as it was for a response whose min_tokens forbade it.
    """
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(torch.tensor([prompt + response])).logits[0] / temperature
    logits[:, model.config.eos_token_id] = -torch.inf
    logprobs = torch.log_softmax(logits, -1)
    return [float(logprobs[len(prompt) - 1 + place, token]) for place, token in enumerate(response)]


def allowed_logprobs(folder: Path, prompt: list[int], allowed: list[int]) -> list[float]:
    """Logprobs of the tokens that may come after `prompt`, where only these may."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(torch.tensor([prompt])).logits[0, -1, allowed]
    return [float(logprob) for logprob in torch.log_softmax(logits, -1)]


def _tokenizer() -> Any:
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
    tokenizer.train_from_iterator([f"{a} + {b} = {a + b}" for a in range(40) for b in range(40)], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|pad|>")
