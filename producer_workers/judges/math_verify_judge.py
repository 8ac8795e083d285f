"""Mathematics, compared as mathematics by the package math-verify: 1/2 is 0.5 is \\frac{1}{2}.

Only its LaTeX grammar is used. Its parser of plain expressions evals what a model wrote, so a plain answer is wrapped
as LaTeX first. Simplifying can take for ever, and its time limit does not work in threads: so this judge wants a
process of its own (judging of kind rq).
"""

from __future__ import annotations

import re
from typing import Any

from producer_workers.judges.answer_text import answer_text
from producer_workers.judges.gsm8k import final_number

_MATHS = re.compile(r"\\boxed|\$|\\\(|\\\[")
_ANSWER = re.compile(r"(?:####|answer(?: is)?\s*:?)\s*(.+?)\s*\.?\s*$", re.IGNORECASE | re.MULTILINE)
_LONGEST = 2000
"""Characters of the end of a response in which its answer is looked for."""


def math_verify(*, response: str, ground_truth: Any, state: object = None) -> float:
    """1.0 for an answer equal to the ground truth, else 0.0. Raises ValueError where that holds no mathematics."""
    from math_verify import LatexExtractionConfig, parse, verify

    def read(text: str) -> list[Any]:
        # without its time limit, which only works in a main thread: the work-horse has one
        config = [LatexExtractionConfig()]
        return list(parse(as_latex(text), extraction_config=config, parsing_timeout=None))

    truth = read(str(ground_truth))
    if not truth:
        raise ValueError(f"the ground truth {ground_truth!r:.80} holds no mathematics")
    return float(verify(truth, read(answer_text(response)), timeout_seconds=None))


def as_latex(text: str) -> str:
    """The end of `text`; what it says as its answer in dollars, where it has no LaTeX."""
    text = text[-_LONGEST:]
    if _MATHS.search(text):
        return text
    if said := _ANSWER.findall(text):
        return f"${said[-1]}$"
    if "\n" not in text and len(text) <= 100:
        return f"${text}$"
    number = final_number(text)
    return f"${number}$" if number is not None else text
