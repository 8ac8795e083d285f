"""1.0 where the response is the ground truth, character by character; else 0.0."""

from __future__ import annotations

from typing import Any

from producer_workers.judges.answer_text import answer_text


def exact_match(*, response: str, ground_truth: Any, state: object = None) -> float:
    """Compares text with text, without white space around it. Raises ValueError without a ground truth."""
    if ground_truth is None:
        raise ValueError("the problem has no ground_truth")
    return float(answer_text(response) == str(ground_truth).strip())
