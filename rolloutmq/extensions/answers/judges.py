"""Judges of answers in text: numbers and mathematics."""

from __future__ import annotations

from typing import Any

from buffer.wire.group import UNPARSED
from rolloutmq.extensions.answers.truths import Comparison, compare_number, number_of, truth_of


def gsm8k(*, response: str, ground_truth: Any, state: object = None) -> dict[str, float]:
    """Return a score of 1.0 for the right final number, else 0.0, and "unparsed" (0 or 1).

    Numbers compare by value: 1,200 is 1200.0. The number follows the last "####", box or "The
    answer is"; else it is the last one, so that a model that has not learned a format is scored for
    its arithmetic. Raises ValueError for a ground truth without one.
    """
    return _scored(compare_number(response, number_of(ground_truth)))


def _scored(verdict: Comparison) -> dict[str, float]:
    is_parsed = verdict is not Comparison.UNPARSED
    return {"score": float(verdict is Comparison.RIGHT), UNPARSED: float(not is_parsed)}


def math_verify(*, response: str, ground_truth: Any, state: object = None) -> dict[str, float]:
    r"""Return a score of 1.0 for an answer that equals the ground truth, and "unparsed" (0 or 1).

    Numbers compare as in `gsm8k`, names as text, other answers by the package math-verify: x(x+1)
    is x^2+x. Only its LaTeX grammar is used, because its other parser runs eval on what a model
    wrote. Simplifying may never end. Raises ValueError if the ground truth holds no mathematics.
    """
    return _scored(truth_of(ground_truth).compare(response))
