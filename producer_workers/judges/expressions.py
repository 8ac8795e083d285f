r"""Compare an answer with a ground truth that is a number, words, or an expression in LaTeX."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from producer_workers.judges.answer_numbers import (
    Number,
    names_number,
    only_denies,
    read_number,
    whole_number,
)
from producer_workers.judges.answers import AnswerSpan, plain, powers, spans

_SEGMENT = re.compile(
    r"\$\$(.{1,1000}?)\$\$|\\\[(.{1,1000}?)\\\]|\\\((.{1,1000}?)\\\)"
    r"|(?<!\\)\$(?!\s)([^$\n]{1,1000})(?<![\s\\])\$(?!\d)",
    re.DOTALL,
)
_FUNCTIONS = (
    "sqrt|sin|cos|tan|cot|sec|csc|arcsin|arccos|arctan|log|ln|exp|pi|frac|max|min|cup|"
    "cap|infty|inf|mod"
)
_PROSE = re.compile(rf"[,;:]?\s+(?!(?:{_FUNCTIONS}|or|and)\b)[A-Za-z]{{2,}}|[,;:]\s*$")
_LEAD = re.compile(
    r"(?i)^\W*?(?:(?:therefore|thus|so|then|hence|just|simply|exactly|is|equal to|given by|the|set|"
    r"option|choice)\b[\s:,]*)+"
)
_LATEX = re.compile(r"\\[a-zA-Z]|[$^_=+*/(\[{\\]|\d")
_UNIT = re.compile(r"\s*(?:\\[,;: ]\s*)?\\(?:text|mathrm|mbox)\{[^{}]*\}(?:\^\{?\d\}?)?\s*$")
_AND = re.compile(r"(?i)\s*(?:\\(?:text|mbox|mathrm)\{\s*(?:or|and)\s*\}|\s(?:or|and)\s)\s*")
_LISTED = re.compile(r"(?i)\s*(?:,|;|or|and|,\s*(?:or|and))\s*")
_DENIED = re.compile(r"(?i)\b(?:not|never|neither)\b[^,;]*$|n't\b[^,;]*$")
_SIGNS = str.maketrans(
    {
        "\u2212": "-",
        "\u2013": "-",
        "\u00d7": "\\times ",
        "·": "\\cdot ",
        "∞": "\\infty ",
        "π": "\\pi ",
        "\u222a": "\\cup ",
    }
)
_ALGEBRA = re.compile(r"\\[a-zA-Z]|[$^*(+√π]|sqrt|\d\s?/")
_CHOICE = re.compile(
    r"(?:option|choice)?\s*\(?([A-Z])(?:[).:]|\s*$|,|\s+(?:because|since|as)\b|\s[-\u2013\u2014])"
)


@dataclass(frozen=True)
class Truth:
    """A ground truth: a number, words (Monday, yes, B), or an expression in LaTeX."""

    text: str
    number: Number | None
    words: str | None

    @classmethod
    def of(cls, text: str) -> Truth:
        """Read a ground truth; of a whole solution, only the answer counts."""
        marked = next((span.text for span in spans(text) if span.is_marked), None)
        text = (marked or text).strip()
        words = _words(text)
        is_words = re.fullmatch(r"[A-Z]|[^\W\d_]{2,}(?: [^\W\d_]+){0,5}", words)
        return cls(text, whole_number(text), words if is_words else None)

    def fits(self, span: AnswerSpan) -> bool:
        if self.words is not None:
            return span.is_marked or self._is_words(span.text)
        if self.number is not None:
            if span.is_marked and only_denies(span.text):
                return False
            return names_number(span.text) or bool(
                re.search(r"\\(?:pi|sqrt|infty)|π|√|∞", span.text)
            )
        return bool(_LATEX.search(span.text)) or (span.is_marked and len(span.text) <= 60)

    def compare(self, span: AnswerSpan) -> tuple[bool, bool]:
        """Return whether an answer could be read, and whether it is right.

        Raises ValueError if the ground truth holds no mathematics.
        """
        if self.words is not None:
            return True, self._is_words(span.text)
        if self.number is not None:
            number = read_number(span.text, is_answer=span.is_marked)
            if number is not None:
                return True, number.equals(self.number)
            if not _ALGEBRA.search(span.text):  # "17 or 18"
                return False, False
        truth = _parse(self.text)
        if not truth:
            raise ValueError(f"the ground truth {self.text!r:.80} holds no mathematics")
        expression = expression_of(span)
        if expression is None or (self.number is not None and whole_number(expression)):
            return False, False
        answer = _parse(expression)
        return bool(answer), bool(answer) and _verify(truth, answer)

    def _is_words(self, text: str) -> bool:
        given = _words(text)
        if self.words is not None and len(self.words) == 1:
            found = _CHOICE.match(given)
            return bool(found) and found is not None and found[1] == self.words
        pattern = rf"{re.escape(self.words or '')}(?:$|[.,;:!]|\s+(?:because|since|as|,))"
        return bool(re.match(pattern, given, re.IGNORECASE))


def _words(text: str) -> str:
    text = re.sub(r"\s+", " ", plain(text)).strip(" .,;:!")
    return re.sub(r"^\(([A-Za-z])\)$", r"\1", text)


def expression_of(span: AnswerSpan) -> str | None:
    """Return the expression of a part of a response, as LaTeX without dollars, or None."""
    found = list(_SEGMENT.finditer(span.text))
    if found:
        return _joined(span, found)
    text = re.sub(r"\*\*(?!\d)|`|(?<!\\)\$|~~|\\[\[\]()]", "", span.text).strip()
    text = _UNIT.sub("", text) or text
    text = _AND.sub(", ", _LEAD.sub("", text))
    if prose := _PROSE.search(text):
        text = text[: prose.start()]
    text = _ascii(text.strip().rstrip(".,;:"))
    return None if not text or _DENIED.search(text) else text


def _joined(span: AnswerSpan, found: list[re.Match[str]]) -> str | None:
    """Return the first segment of an answer, or the last one of a sentence, and those listed."""
    found = found if span.is_marked else found[::-1]
    taken = found[:1]
    for one, other in pairwise(found):
        left, right = sorted((one, other), key=lambda each: each.start())
        if not _LISTED.fullmatch(span.text[left.end() : right.start()]):
            break
        taken.append(other)
    taken.sort(key=lambda each: each.start())
    if _DENIED.search(span.text[: taken[0].start()][-40:]):
        return None
    parts = ["".join(filter(None, each.groups())).strip(" .,;\n") for each in taken]
    if len(parts) > 1:  # x = 1 or x = 2
        parts = [re.sub(r"^\s*[a-z]\s*=\s*", "", part) for part in parts]
    return _ascii(_AND.sub(", ", ", ".join(parts)))


def _ascii(text: str) -> str:
    text = re.sub(r"√\s*\(?(\w+)\)?", r"\\sqrt{\1}", powers(text)).translate(_SIGNS)
    return _UNIT.sub("", text) or text


def _parse(text: str) -> list[Any]:
    from math_verify import LatexExtractionConfig, parse

    # Without its time limit, which only works in a main thread: the rq job has one.
    config = [LatexExtractionConfig()]
    if not _SEGMENT.fullmatch(text):
        text = f"${text}$"
    return list(parse(text, extraction_config=config, parsing_timeout=None))


def _verify(truth: list[Any], answer: list[Any]) -> bool:
    from math_verify import verify

    return bool(verify(truth, answer, timeout_seconds=None))
