"""The text of a response without its thoughts, and of a ground truth, as all judges read them."""

from __future__ import annotations

import math
from typing import Any

# Decoding leaves these in the text where a tokenizer does not mark its end of turn as special.
END_MARKERS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<end_of_turn>", "</s>")


def answer_text(response: str) -> str:
    """Return `response` without surrounding white space and trailing end markers."""
    text = response.strip()
    while text.endswith(END_MARKERS):
        marker = next(marker for marker in END_MARKERS if text.endswith(marker))
        text = text.removesuffix(marker).rstrip()
    return text


def without_thoughts(response: str) -> str | None:
    """Return what follows the thoughts of a response; None if it ends within them."""
    _, thought_end, said = response.rpartition("</think>")
    return None if not thought_end and "<think>" in response else said


def text_of(truth: Any) -> str:
    """Return a ground truth as text; that of a list of one is its element's, and 18.0 is "18".

    Raises ValueError for one that no answer equals: None, NaN, infinity, bytes, other lists.
    """
    if isinstance(truth, list) and len(truth) == 1:
        truth = truth[0]
    if isinstance(truth, float) and math.isfinite(truth):
        return str(int(truth)) if truth.is_integer() and abs(truth) < 2**53 else repr(truth)
    if isinstance(truth, str | int) and str(truth).strip():
        return str(truth).strip()
    raise ValueError(f"the ground truth {truth!r:.80} is no text and no finite number")
