"""Provide a real Hugging Face tokenizer without download.

It has bytes, three special tokens, and a chat template.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SPECIAL = ["<|pad|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}{% if m.role not in ['user', 'assistant', 'system'] %}"
    "{{ raise_exception('no such role: ' + m.role) }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    # here: tests of the core have none of these
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate(SPECIAL + letters)}
    backend = Backend(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    wrap: Any = PreTrainedTokenizerFast  # has no type hints
    made = wrap(
        tokenizer_object=backend,
        pad_token="<|pad|>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
    )
    made.chat_template = TEMPLATE
    return made


@pytest.fixture(scope="session")
def readme_block() -> Callable[[str], str]:
    page = Path(__file__).parents[2] / "docs" / "pages" / "tools_and_agents.md"
    text = page.read_text(encoding="utf-8")

    def block(name: str) -> str:
        found = re.search(rf"```python\n# {re.escape(name)}\b.*?\n(.*?)```", text, re.DOTALL)
        assert found, f"{page} has no {name}"
        return found[1]

    return block


@pytest.fixture
def chat(tokenizer: Any) -> Any:
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = tokenizer.chat_template.replace("'system']", "'system', 'tool']")
    return tokenizer
