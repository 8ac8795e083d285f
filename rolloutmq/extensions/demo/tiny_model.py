"""A small model of the Qwen3 architecture and its tokenizer, built locally without a download.

The folder is an ordinary Hugging Face one; `rolloutmq.extensions.demo.warm_start` trains its random
weights. Printable ASCII has one token per character, so every digit is a token; `phrases` become
one token each, which makes prompts shorter.
"""

from __future__ import annotations

import string
from pathlib import Path
from typing import TYPE_CHECKING

from buffer.weights.new_folder import new_folder
from consumer.grpo.models.model_folder import save_model
from rolloutmq.config.small_model import TinyModelConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen3Config


PAD = "<|pad|>"
END = "<|end|>"
UNKNOWN = "<|unk|>"
SPECIAL = (PAD, END, UNKNOWN, "<|system|>", "<|user|>", "<|assistant|>")
CHARACTERS = string.digits + string.ascii_letters + string.punctuation + " \n"

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ '<|end|>' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def build_tiny_model(out_dir: Path, spec: TinyModelConfig, seed: int) -> None:
    """Write a model folder with random weights: config, safetensors, tokenizer with chat template.

    The same spec and seed give the same weights. Raises ModelError where `out_dir` exists.
    """
    import torch
    from transformers import Qwen3ForCausalLM

    tokenizer = build_tokenizer(spec)
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    with new_folder(out_dir) as folder, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(architecture(spec, tokenizer))
        model.generation_config.do_sample = True
        model.generation_config.temperature = 1.0
        save_model(model, folder)
        tokenizer.save_pretrained(folder)


def build_tokenizer(spec: TinyModelConfig) -> PreTrainedTokenizerFast:
    """Return a tokenizer of ASCII characters and phrases; other characters become `<|unk|>`."""
    from tokenizers import AddedToken, Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: number for number, token in enumerate((*SPECIAL, *CHARACTERS))}
    # a byte-pair model without merges: one token per character, and no pre-tokenizer drops a space
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=UNKNOWN))
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL]
    )
    backend.add_tokens([AddedToken(phrase, normalized=False) for phrase in spec.phrases])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        chat_template=CHAT_TEMPLATE,
        model_max_length=spec.max_positions,
        clean_up_tokenization_spaces=False,
    )


def architecture(spec: TinyModelConfig, tokenizer: PreTrainedTokenizerFast) -> Qwen3Config:
    from transformers import Qwen3Config

    rows = max(len(tokenizer), spec.vocab_size or 0)
    return Qwen3Config(
        # a multiple of 64 suits matrix kernels and tensor parallelism
        vocab_size=-(-rows // 64) * 64,
        hidden_size=spec.hidden,
        num_hidden_layers=spec.layers,
        num_attention_heads=spec.heads,
        num_key_value_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        intermediate_size=spec.intermediate,
        max_position_embeddings=spec.max_positions,
        initializer_range=spec.init_std,
        tie_word_embeddings=True,
        attention_dropout=0.0,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
