"""Grade-school maths, scored as GSM8K does (Cobbe et al. 2021): the number behind "####".

A response without "####" is scored by its last number, so that a model which has not been taught the format
is scored for its arithmetic. Numbers are compared as numbers: 1,200 is 1200.0.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

_NUMBER = re.compile(r"(?<![\d.,])-?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?", re.ASCII)
_TAIL_CHARS = 2000  # a response that never says its answer is not searched from end to end
_LONGEST_NUMBER = 50


def gsm8k(*, response: str, ground_truth: Any, state: object = None) -> float:
    """1.0 for the right final number, else 0.0. Raises ValueError where the ground truth holds none."""
    right = final_number(str(ground_truth))
    if right is None:
        raise ValueError(f"the ground truth {ground_truth!r:.80} holds no number")
    return float(final_number(response) == right)


def final_number(text: str) -> Decimal | None:
    """The first number behind the last "####", or the last number of a text without "####"."""
    _, marker, answer = text.rpartition("####")
    numbers = _NUMBER.findall(answer[:_TAIL_CHARS] if marker else text[-_TAIL_CHARS:])
    if not numbers:
        return None
    number = numbers[0] if marker else numbers[-1]
    return Decimal(number.replace(",", "")) if len(number) <= _LONGEST_NUMBER else None
