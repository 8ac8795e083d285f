r"""Read numbers as models write them: $1,200, (-3), 1 1/2, \dfrac{1}{2}, 50 %, 1.8e3, **18** km.

All patterns take time in proportion to the text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction
from typing import NamedTuple

from producer_workers.judges.answers import plain

_LONGEST = 50  # digits of the longest number that is read


class Number(NamedTuple):
    """A number that a text names. Its value is that of the number before a percent sign."""

    value: Fraction
    is_percent: bool = False

    def __str__(self) -> str:
        exact = Decimal(self.value.numerator) / self.value.denominator
        text = f"{exact:f}" if Fraction(exact) == self.value else str(self.value)
        return text + "%" * self.is_percent

    def equals(self, truth: Number) -> bool:
        """Return whether an answer is right.

        50% is right for 50 (a question may ask for a percentage), 50% and 0.5; 0.5% is not right
        for 0.5. If only the truth has the sign, 50 and 0.5 are right for 50%.
        """
        mine, other = self.value, truth.value
        if self.is_percent == truth.is_percent:
            return mine == other
        if self.is_percent:
            return mine / 100 == other or (mine == other and abs(other) >= 1)
        return mine in (other, other / 100)


# -- numbers of a text -----------------------------------------------------------------------------

_INTEGER = r"(?:\d{1,3}(?:,\d{3})+|\d{1,3}(?:\ \d{3})+|\d{1,2}(?:,\d\d)+,\d{3}|\d+)(?![\d]|,\d)"
_DECIMAL = rf"(?:{_INTEGER}(?:\.\d+)?|\.\d+)"
_NUMBER = re.compile(
    rf"""(?<![\w.,^{{\\])
    (?:
      (?P<whole>\d{{1,9}})\ +(?P<over>\d{{1,9}})\s?/\s?(?P<under>\d{{1,9}})(?!\d)
      | (?P<top>{_DECIMAL})\s?/\s?(?P<bottom>{_DECIMAL})
      | (?P<base>\d{{1,9}})\^\{{?(?P<power>-?\d{{1,2}})\}}?(?![\d.])
      | (?P<plain>{_DECIMAL})
        (?:\s?[*x]\s?10\s?\^\s?\{{?\s?(?P<ten>[-+]?\d{{1,3}})\s?\}}?(?!\d)
          | e(?P<e>[-+]?\d{{1,3}})(?!\w))?
    )
    (?P<scale>\s{{0,3}}(?:hundred|thousand|million|billion|trillion)\b|k(?!\w))?
    (?P<percent>\s{{0,2}}(?:%|per\s?cent\b|pct\b|percentage\ points?\b))?
    """,
    re.VERBOSE | re.ASCII | re.IGNORECASE,
)
_SCALES = {"": 1, "hundred": 100, "k": 10**3, "thousand": 10**3, "million": 10**6}
_SCALES |= {"billion": 10**9, "trillion": 10**12}

_UNITS = (
    "m|s|g|l|h|w|c|f|v|n|j|k|st|nd|rd|th|am|pm|cm|mm|km|kg|mg|ml|ft|in|lb|lbs|oz|mi|hr|hrs|min|"
    "mph|yd"
)
# What makes a number a part of an expression, a time of day, or a version: 18x, 18\pi, 18!, 18:30.
_GOES_ON = re.compile(
    rf"""(?!(?:(?-i:[msghlCFWVNJKL])|(?:{_UNITS})(?<=\w\w))(?![a-z]))[a-z]{{1,2}}(?![a-z])    # 18x
    | \ ?(?:\\(?!text|mathrm|mbox|\\)[a-z]|pi\b|sqrt)
    | \ (?!(?:{_UNITS}|a|i)(?![a-z]))[a-z](?![a-z])\s*(?:$|[-+*/^=),.<]) # 18 x
    | \d|\.{{2,}}\s?\d|\ (?:squared|cubed|factorial|choose)\b
    | [\^{{(!_](?=\S)|:\d|\.\d|,\d|\s?[-+*/^]\s?(?:\(|\\|[a-z](?![a-z]))
    | \?|\+\s*$ | \s?[±<>≤≥≠] """,
    re.VERBOSE | re.IGNORECASE,
)
_BELONGS = re.compile(
    r"(?:(?:sqrt|√|log|ln|sin|cos|tan)\s*[({\[]?|\b[a-z]\(|[<>≤≥≠±_]|"
    r"\b(?:under|over|above|below|beyond|exceeds)|\b(?:more|less|greater|fewer|larger|"
    r"smaller|higher|lower|bigger) than|[)a-zπ]\s?[*/^+-]|\\[a-z]+\s?[*/+-]|"
    r"\b(?:step|question|problem|part|exercise|figure|equation))\s*$",
    re.IGNORECASE,
)
_DENIED_BEFORE = re.compile(
    r"(?:\bnot|n t|\bnever|\bneither|\bnor|\brather than|\binstead of|\bother than|\bunlike)\b"
    r"(?:\s+(?!but\b)[a-z]+){0,2}\s*[:=]?\s*$",
    re.IGNORECASE,
)
_DENIED_AFTER = re.compile(
    r"\W{0,3}(?:(?!because|since|as\b)[a-z]+\W){0,2}"
    r"(?:(?:is|was|would be|seems?|looks?)\s*(?:n t\b|not\b|clearly |also |"
    r"obviously )?(?:wrong|incorrect|false|too |not\b)|(?:is|was)n t\b|is not\b|ca(?:n t|nnot) be)",
    re.IGNORECASE,
)


class _Token(NamedTuple):
    number: Number | None  # None where it is denied, or a part of an expression
    start: int
    end: int
    is_denied: bool


def _tokens(text: str) -> list[_Token]:
    tokens: list[_Token] = []
    for found in _NUMBER.finditer(text):
        token = _token(text, found)
        if token is None:
            continue
        gap = text[tokens[-1].end : token.start] if tokens else ""
        if gap and tokens[-1].is_denied and re.fullmatch(r"(?i)\W*n?or\W*", gap):
            token = token._replace(number=None, is_denied=True)  # "not 17 or 18"
        tokens.append(token)
    return tokens


def _token(text: str, found: re.Match[str]) -> _Token | None:
    start, end = found.span()
    before = text[max(0, start - 40) : start]
    sign, start = _sign(before, start)
    before, after = text[max(0, start - 40) : start], text[end : end + 40]
    is_item = re.search(r"(?:^|\n)[\s>]*$", before) and re.match(r"[.)]\s+\S", after)
    if is_item and found["plain"] and found["plain"].isdigit() and len(found["plain"]) < 3:
        return None
    is_denied = bool(_DENIED_BEFORE.search(before) or _DENIED_AFTER.match(after))
    is_part = bool(_BELONGS.search(before) or _GOES_ON.match(after))
    is_part |= bool(found["percent"] and re.match(r"\s*of\s+\d", after))
    value = None if is_denied or is_part or end - start > _LONGEST else _value(found)
    number = None if value is None else Number(sign * value, bool(found["percent"]))
    return _Token(number, start, end, is_denied)


def _sign(before: str, start: int) -> tuple[int, int]:
    """Return the sign of a number at `start`, and where it begins with its sign."""
    found = re.search(r"([-+])( ?)$", before)
    if not found:
        return 1, start
    left = before[: found.start()]
    is_first = not left.strip() or left.rstrip()[-1] in "([{=:,<>|*/±"
    is_attached = not found[2] and left[-1:].isspace() and left.rstrip()[-1:].isalpha()
    if not (is_first or is_attached):
        return 1, start
    return (-1 if found[1] == "-" else 1), start - len(found[0])


def _value(found: re.Match[str]) -> Fraction | None:
    parts = ("whole", "over", "under", "top", "bottom", "base", "plain")
    part = {name: _decimal(found[name]) for name in parts if found[name]}
    try:
        if found["whole"]:
            value = part["whole"] + part["over"] / part["under"]
        elif found["top"]:
            value = part["top"] / part["bottom"]
        elif found["base"]:
            value = part["base"] ** int(found["power"])
        else:
            value = part["plain"] * Fraction(10) ** int(found["ten"] or found["e"] or 0)
    except ZeroDivisionError:
        return None
    return Fraction(value) * _SCALES[(found["scale"] or "").strip().lower()]


def _decimal(text: str) -> Fraction:
    digits = re.sub(r"[^\d.-]", "", text)
    return Fraction(digits) if re.search(r"\d", digits) else Fraction(0)


# -- the number of an answer -----------------------------------------------------------------------

_FILLERS = re.compile(
    r"(?:[\s:=*|,\[({~]|(?:therefore|thus|so|then|hence|about|approximately|approx\.?|roughly|"
    r"around|exactly|precisely|simply|just|only|indeed|clearly|equal to|equals?|given by|still|"
    r"also|now|actually|is|are|was|be|a total of|in total|the number|the value|we get|we have|the|"
    r"an?|option)\b|(?:(?<=\s)|^)[A-Za-z](?:_\w)?(?:\([a-z]\))?\s*=)*",
    re.IGNORECASE,
)
_OPERATOR = re.compile(
    r"\s*(?:[%°]|\b[a-z]{1,20}\b)?\s*(?:[-+*/x]|times|plus|minus|divided by|multiplied by|over)\s*"
    r"[(]?\s*(?:[a-z]{1,20}\s*)?", re.IGNORECASE
)  # fmt: skip
_EQUALS = re.compile(r"[^.;=]{0,40}=[\s=]*")
_HEDGE = re.compile(
    r"""(?:[^.;!?\n]{0,40}\bor\b[^.;!?\n]{0,40}
    | \W{0,3}(?:[a-z%°]+\W){0,3}(?:and|to|through|&|vs\.?|versus)\s+
      (?:(?:also|maybe|perhaps|possibly)\s+)?
    | \s*[a-z%°]*\s*[,;/|]\s*(?:(?:and|maybe|perhaps|possibly|or|then)\s+)?
    | \s*[a-z%°]*\s*-\s* | \s*[([]?[A-Z][).:\]]\s*
    | \s+ | \s*[a-z%°]*\W{0,2}\s*(?:i\ mean|make\ that|no|wait|actually|sorry|or)\b[\s,.]*
    | \s*(?:maybe|perhaps|possibly)\s*)""",
    re.VERBOSE | re.IGNORECASE,
)
_OFFERS = re.compile(r"(?i)\bor\b|^\s+$|^[,;]\s*(?:and\s+)?$|^\s*[([]?[A-Z][).:\]]\s*$")
_BETWEEN = re.compile(r"(?i)\b(?:between|from|either|range)\b")
_UNIT_RATIOS = frozenset({2, 3, 4, 7, 8, 12, 16, 24, 36, 52, 60, 100, 365, 1000, 3600})


_ONES = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"),
    *("eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen"),
    "nineteen",
)
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
_SPELLED = re.compile(
    rf"[\s*_]*(?:(?:{'|'.join(_TENS)})(?:[- ](?:{'|'.join(_ONES[1:10])}))?|{'|'.join(_ONES)})\b"
    r"(?![- ]*(?:of|hundred|thousand|million|dozen|point|and|or|half|thirds?|quarters?|fifths?)\b)",
    re.IGNORECASE,
)


def names_number(text: str) -> bool:
    """Return whether a text has a digit, or begins with a number in words."""
    return bool(re.search(r"\d|[½⅓⅔¼¾⅛⅕]", text) or _SPELLED.match(text))


def only_denies(text: str) -> bool:
    """Return whether a text names numbers only to say that they are wrong."""
    tokens = _tokens(plain(text))
    return bool(tokens) and all(token.is_denied for token in tokens)


def _spelled(text: str) -> Number | None:
    """Return the number below 100 in words that begins a text: "twenty-one apples"."""
    found = _SPELLED.match(text)
    if not found:
        return None
    words = re.findall("[a-z]+", found[0].lower())
    each = [_ONES.index(w) if w in _ONES else 10 * _TENS.index(w) + 20 for w in words]
    return Number(Fraction(sum(each)))


def read_number(text: str, *, is_answer: bool = True) -> Number | None:
    """Return the number that a sentence gives as its answer, or None.

    `is_answer`: the text follows "The answer is", so its first number counts; else the last. In an
    equation, the number behind the last "=" counts. None also for "not 18", "17 or 18", "9 * 2".
    """
    text = plain(text)
    tokens = _tokens(text)
    if not is_answer and (outside := [each for each in tokens if not _in_brackets(text, each)]):
        tokens = outside
    if not tokens:
        return _spelled(text) if is_answer else None
    lead = _FILLERS.match(text)
    if is_answer and lead and lead.end() >= tokens[0].start:
        return _first(text, tokens)
    return _last(text, tokens)


def whole_number(text: str) -> Number | None:
    """Return the number of a text that is a number with a unit at most, as ground truths are."""
    text = plain(text)
    tokens = _tokens(text)
    lead = _FILLERS.match(text)
    if len(tokens) != 1 or not lead or lead.end() < tokens[0].start:
        return None
    is_unit = re.fullmatch(r"[\s\w°/^.()\]}|-]*", text[tokens[0].end :])
    return tokens[0].number if is_unit else None


def _first(text: str, tokens: Sequence[_Token]) -> Number | None:
    """Return the number that begins a text, or the result of the equation that begins it."""
    sides, last = [[tokens[0]]], 0
    for last, token in enumerate(tokens[1:], 1):
        gap = text[tokens[last - 1].end : token.start]
        if _EQUALS.fullmatch(gap):
            sides.append([token])
        elif _OPERATOR.fullmatch(gap):
            sides[-1].append(token)
        else:
            last -= 1
            break
    if len(sides) > 1 and "=" in text[tokens[last].end :]:  # 16 - 7 = 9, 9 * 2 = 18
        return _last(text, tokens)
    chosen = next((side[0] for side in (sides[-1], sides[0]) if len(side) == 1), None)
    if chosen is None or chosen.number is None:
        return None
    others = tokens[last + 1 : last + 2]
    return None if others and _is_open(text, tokens[last], others[0]) else chosen.number


def _last(text: str, tokens: Sequence[_Token]) -> Number | None:
    """Return the last number of a text that is not denied."""
    stated = [token for token in tokens if not token.is_denied]
    if not stated:
        return None
    if len(tokens) == 1:
        return stated[0].number
    left, right = tokens[-2:]
    gap = text[left.end : right.start]
    if right is stated[-1] and left.number and _OPERATOR.fullmatch(gap):
        return None
    if _OFFERS.search(gap) or _BETWEEN.search(text[: left.start][-40:]):
        is_denied = left.is_denied or right.is_denied
        return None if not is_denied and _is_open(text, left, right) else stated[-1].number
    return stated[-1].number


def _is_open(text: str, one: _Token, other: _Token) -> bool:
    """Return whether a text leaves open which of two numbers is meant ("17 or 18")."""
    gap, after = text[one.end : other.start], text[other.end :]
    if other.is_denied or not _HEDGE.fullmatch(gap):
        return False
    if re.fullmatch(r"[^,;]*[,;]\s*", gap) and not re.match(
        r"\W{0,3}(?:$|[,.;]|and\b|or\b)", after
    ):
        return False
    if one.number is None or other.number is None:
        return True
    left, right = one.number, other.number
    if left.equals(right) or right.equals(left):
        return False
    # 90 minutes or 1.5 hours: the same in another unit
    units = re.match(r"\s*([a-z]*)", gap, re.I), re.match(r"\s*([a-z]*)", after, re.I)
    names = [found[1].lower() for found in units if found and found[1] not in ("", "or")]
    if len(names) < 2 or names[0] == names[1] or not left.value or not right.value:
        return True
    ratio = left.value / right.value
    return max(ratio, 1 / ratio) not in _UNIT_RATIOS


def _in_brackets(text: str, token: _Token) -> bool:
    left = text[max(0, token.start - 80) : token.start]
    return left.rfind("(") > left.rfind(")") and ")" in text[token.end : token.end + 80]
