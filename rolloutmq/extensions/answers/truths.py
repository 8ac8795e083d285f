r"""Compare responses with a ground truth: a number, a name (Monday, 2024-05-01), or mathematics."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Any

from producer_workers.judges.response_text import text_of
from rolloutmq.extensions.answers.grammar import JOIN, LEAD, UNIT, Reading, is_left, kinds_of, read
from rolloutmq.extensions.answers.spans import AnswerSpan, has_decimal_commas, spans
from rolloutmq.extensions.answers.values import BOX_END, BOX_START, GUESS, Value, plain


class Comparison(Enum):
    """What a judge can say of a response."""

    RIGHT = "right"
    WRONG = "wrong"
    UNPARSED = "unparsed"


def number_of(truth: Any) -> Value:
    """Return the number of a ground truth, or of a solution's answer. Raises ValueError."""
    number = _known_number(text_of(truth))
    if number is None:
        raise ValueError(f"the ground truth {truth!r:.80} holds no number")
    return number


def _number(text: str) -> Value | None:
    """Return the number that a text gives as its answer, or None."""
    reading = read_answer(text)
    values = reading.values if reading else ()
    return values[0] if len(values) == 1 and values[0].number is not None else None


_known_number = lru_cache(maxsize=1024)(_number)  # of ground truths, which come again and again


def read_answer(response: str) -> Reading | None:
    """Return what a response gives as its answer; None if it names no value."""
    for span in spans(response):
        reading = _read(span, response)
        if reading is not None:
            return reading
    return None


def _read(span: AnswerSpan, response: str) -> Reading | None:
    commas = has_decimal_commas(span.text, response)
    return read(span.text, is_answer=span.is_marked, has_decimal_commas=commas)


def compare_number(response: str, truth: Value) -> Comparison:
    """Return whether a response gives this number."""
    number = _number(response)
    return Comparison.UNPARSED if number is None else _compared(number, truth)


def _compared(value: Value, truth: Value) -> Comparison:
    if value.equals(truth):
        return Comparison.RIGHT
    return Comparison.UNPARSED if value.is_unsure else Comparison.WRONG


# -- any ground truth ------------------------------------------------------------------------------

_MATHEMATICS = re.compile(rf"(?:[nequmf]{{1,4}}=)*[neq]{UNIT}(?:{JOIN}[neq]{UNIT})*[.]?")
_CODE = re.compile(r"\(?[A-Z]\)?|\d+(?:\s?[-:]\s?\d+)+")
_PHRASE = re.compile(r"[fabm:(]*[uVnqefmvsci)o-]{1,6}[.!L]*")
_NAME_ENDS = re.compile(r"(?:$|[.;:!)L|(,-]|y|b[fa]*m|b[fa]+(?:$|[.,;!)]))(?!.*[rkw])")


@dataclass(frozen=True)
class Truth:
    """A ground truth: a number, a `name`, or mathematics in `latex`."""

    latex: str = ""
    number: Value | None = None
    name: str | None = None

    @classmethod
    @lru_cache(maxsize=1024)
    def of(cls, text: str) -> Truth:
        """Read a ground truth; of a whole solution, only the answer counts."""
        marked = next((span.text for span in spans(text) if span.is_marked), text)
        raw = marked.rpartition(BOX_START)[2].partition(BOX_END)[0]
        text = plain(raw).strip(" .\n")
        kinds = kinds_of(text)
        is_counted = re.search("[uV]", kinds) and re.search("[ne].*[ne]", kinds)
        if _CODE.fullmatch(text) or is_counted:  # B, 3-2, 5 apples and 3 pears
            return cls(name=text)
        reading = read(text, is_answer=True) if _MATHEMATICS.fullmatch(kinds) else None
        if reading and reading.values:
            value = reading.values[0]
            is_one = len(reading.values) == 1 and not re.match("e.*=", kinds)
            is_number = is_one and not value.is_unsure and value.number is not None
            latex = value.latex if is_number else ", ".join(reading.equations)
            return cls(latex, value if is_number else None)
        is_name = "\\" not in text and not re.search("[zq=]", kinds) and re.search(r"\w", text)
        return cls(name=text) if is_name else cls(raw.strip(" $."))

    def compare(self, response: str) -> Comparison:
        """Return whether a response gives this answer.

        Raises ValueError if the ground truth holds no mathematics.
        """
        for span in spans(response):
            if self.name is not None:
                verdict = self._compare_name(span)
                is_doubt = re.search("[dNrkw]", kinds_of(plain(span.text)))
                if verdict is not Comparison.UNPARSED or span.is_marked or is_doubt:
                    return verdict
                continue
            reading = _read(span, response)
            if reading is not None:
                return self._compare(reading)
        return Comparison.UNPARSED

    def _compare(self, reading: Reading) -> Comparison:
        values = reading.values
        is_list = re.search(r"[,;±]|\\pm|\\{", self.latex)
        if not values or (len(values) > 1 and not is_list):
            return Comparison.UNPARSED
        if self.number is not None and values[0].number is not None:
            return _compared(values[0], self.number)
        answers = reading.equations if "=" in self.latex else [value.latex for value in values]
        answer = ", ".join(answers)
        for letters in re.findall(f"{GUESS}([a-zA-Z ]+)", answer):
            if not set(letters) <= set(self.latex):
                return Comparison.UNPARSED  # a word or a unit
        return _verified(self.latex, answer)

    def _compare_name(self, span: AnswerSpan) -> Comparison:
        """Return whether a part of a response is this name, with nothing beside it."""
        assert self.name is not None
        text = _simple(span.text)
        start, end = text.find(BOX_START), text.rfind(BOX_END)
        left, right = "", ""
        if start >= 0:
            left, text, right = text[:start], text[start + 1 : end], text[end + 1 :]
            if not is_left(kinds_of(left)) or not _NAME_ENDS.match(kinds_of(right)):
                return Comparison.UNPARSED
        for found in self._occurrences(text):
            before, behind = kinds_of(text[: found.start()]), kinds_of(text[found.end() :])
            is_listed = re.search("[uVqnm][,cr]+[fa]*$", before)
            is_begun = LEAD.fullmatch(before) or (is_left(before) and not is_listed)
            if is_begun and (found[0][-1:] == ")" or _NAME_ENDS.match(behind)):
                return Comparison.RIGHT
        is_other = _PHRASE.fullmatch(kinds_of(text)) and not any(self._occurrences(text))
        return Comparison.WRONG if is_other else Comparison.UNPARSED

    def _occurrences(self, text: str) -> Iterator[re.Match[str]]:
        assert self.name is not None
        words = r"\s*".join(map(re.escape, _simple(self.name).strip("()").split()))
        flags = 0 if len(self.name.strip("()")) == 1 else re.IGNORECASE
        pattern = rf"(?<![\w.:/-])\(?{words}\)?(?!\w|[-./:]\d|[-']\w)"
        return re.finditer(pattern, text, flags)


def _simple(text: str) -> str:
    return re.sub(
        r"\s*-\s*|\s+", lambda found: "-" if "-" in found[0] else " ", plain(text)
    ).strip()


def truth_of(given: Any) -> Truth:
    """Read a ground truth of any kind. Raises ValueError as `text_of` does."""
    return Truth.of(text_of(given))


def _verified(truth: str, answer: str) -> Comparison:
    expected, given = _parse(truth), _parse(answer)
    if not expected:
        raise ValueError(f"the ground truth {truth!r:.80} holds no mathematics")
    from math_verify import verify

    if not given:
        return Comparison.UNPARSED
    # Without its time limit, which only works in a main thread: the rq job has one.
    is_right = verify(expected, given, timeout_seconds=None, allow_set_relation_comp=True)
    return Comparison.RIGHT if is_right else Comparison.WRONG


def _parse(latex: str) -> list[Any]:
    from math_verify import LatexExtractionConfig, parse

    config = [LatexExtractionConfig()]
    text = f"${latex.replace(GUESS, '')}$"
    return list(parse(text, config, fallback_mode="no_fallback", parsing_timeout=None))
