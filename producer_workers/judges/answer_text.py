"""The answer in a response: its text without what only ends a turn."""

from __future__ import annotations

# Of tokenizers that do not call their end of turn special, so that decoding leaves it in the text.
END_MARKERS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<end_of_turn>", "</s>")


def answer_text(response: str) -> str:
    """`response` without surrounding white space and without end markers behind it; nothing else goes."""
    text = response.strip()
    while marker := next((m for m in END_MARKERS if text.endswith(m)), None):
        text = text.removesuffix(marker).rstrip()
    return text
