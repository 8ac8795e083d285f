"""Read the answer of a sentence: nothing but a unit or an approximation may stand beside it.

A sentence is a line of kinds: a letter for each word (`answer_words`), n for a number, e for any
other value, q for a lone letter, P for a number told in brackets, D for a value that is denied, and
the signs themselves (L: a new line, z: a sign of mathematics that belongs to no value). The rules
are regular expressions over that line. What they do not allow is never read: the sentence leaves
its answer open, which counts as unparsed.
"""

from __future__ import annotations

import re
import unicodedata
from itertools import pairwise
from typing import NamedTuple

from rolloutmq.extensions.answers.values import (
    BOX_END,
    BOX_START,
    END,
    Token,
    Value,
    plain,
    tokens_of,
    value_at,
)
from rolloutmq.extensions.answers.words import (
    PARTS,
    UNIT_LETTERS,
    UNITS,
    kind_of,
    may_be_verb,
    spelled,
)

# -- the rules -------------------------------------------------------------------------------------

UNIT = r"(?:[-/j*]?[umfV]){0,9}"  # square feet, km/h, dollars per day, 90-minute sessions
JOIN = r"(?:[,;]?[cr]|[,;|])[fa]*(?:[qu]=)?"  # between the values of a list: and, or, a comma
_CLOSE = r"(?:$|[.,;!)L|(P])"

# between "The answer is" and the answer
LEAD = re.compile(r"(?:[fabmovsTyj,:.=(|L-]|[eqnuV][eqnumfV]{0,3}=)*")
_LEFT = re.compile(
    rf"""(?: ^ | [,;:.!?()L|=y-] | ,w | D{UNIT}w       # begins a part; "not 20 but 18"
          | (?<!T)b | b(?:f?T|s)                       # is, is equal to; no "used to be"
          | v | V | (?:[vV]|su)f?[Tpi] | [vV]fTb        # makes, falls to, turns out to be
          | [sT]u | m | mo                             # we plant, the total of
        )[fak]*$""",
    re.VERBOSE,
)
_LEFT_ALONE = re.compile(r"i[fa]*$")  # "in 18 days", where no other number is
_SPOILED = re.compile(
    r"[dN][^.;L!?]*$ | r[^,;.(L!?wy]*$ | [xMpoitT][fa]*[:,(=L-]+[fa]*$", re.VERBOSE
)
_RIGHT = re.compile(
    rf"""(?:M(?=[umV]))?{UNIT}(?:                     # 18 more apples, but no "18 more than 5"
          $ | [.!;:)L|(P-] | ,(?!w|c?[qu]{{1,2}}=) | y
          | [ito](?![fa]*[nex]) | p(?!a*[nex]) | i[fa]*n  # of rice, in 3 weeks; no "of 60"
          | T(?![^.,;L]*[nex]) | [vV](?![^.;,L]*[nedNrx])
          | b[fa]*m | b[fa]+(?:{_CLOSE}|[iyc]) | sb{_CLOSE}  # is the answer, are left
          | c?f?D | c?[fd][fp]*D | ,?wf*D              # "not 20", "rather than 20", "but not 20"
          | c(?![fasTvb]*[neq])
        )""",
    re.VERBOSE,
)
_OTHERS = re.compile(rf"{UNIT}{JOIN}(?=[ne]{UNIT}(?:{_CLOSE}|{JOIN}))")  # 1, 2 and 3
_ANOTHER = re.compile(rf"[ne]{UNIT}{JOIN}$")
_RANGE = re.compile(rf"{UNIT}(?:[pT-]|[,;|]?r)?[fasTvbr]*")  # 17 to 18; 6 feet 2 inches
_EQUALS = re.compile(rf"([neq]){UNIT}=[fa]*$")
_TAKEN_BACK = re.compile(rf"w(?!f*D)|k[^ne]*[ne]|r[fasTvb]*n|y[sb]{{0,2}}[fa]*[dN]{_CLOSE}")
_DENIED = re.compile(  # 18 isn't right, 18 is wrong, 18 is too low
    rf"[umfV]{{0,4}}(?:N|[bsv]{{1,3}}[fa]?(?:d|x(?={_CLOSE}))|\(?[fa]*d(?={_CLOSE}))"
)
_TOUCHED = re.compile(rf"\d[.,:]?{BOX_START}|\.{BOX_START}|{BOX_END}[.,:]?\d")  # 0.\boxed{18}

_SIGNS = {sign: sign for sign in "=,;.?!()|/:-*"} | {
    "…": ".", "...": ".", "--": "-", "---": "-", "~": "a", "[": "(", "{": "(", "\\{": "(", "]": ")",
    "}": ")", "\\}": ")", "\\|": "|", "&": "c",
}  # fmt: skip
_UNIT_RATIOS = frozenset({2, 3, 4, 7, 8, 12, 16, 24, 36, 52, 60, 100, 365, 1000, 3600})


# -- the line of a sentence ------------------------------------------------------------------------


class Part(NamedTuple):
    """A word, a sign or a value, by its place in the plain text."""

    kind: str
    start: int
    end: int
    value: Value | None = None


def parts_of(text: str, *, has_decimal_commas: bool = False) -> list[Part]:
    """Return the parts of a plain text."""
    tokens = tokens_of(text)
    found: list[Part] = []
    at = 0
    while (token := tokens[at]) is not END:
        before = _kinds(found[-8:])
        kind, end, value = _word(tokens, at, before) if token.kind == "word" else ("", at + 1, None)
        is_dash = token.text in "+-" and before and not _is_sign(token, tokens[at + 1], before)
        if not kind and not is_dash:
            kind, end, value = _value(tokens, at, before, has_decimal_commas)
        kind = kind or _kind(tokens, at)
        if kind != " ":
            found.append(Part(kind, token.start, tokens[end - 1].end, value))
        at = end
    return found


def _word(tokens: list[Token], at: int, before: str) -> tuple[str, int, Value | None]:
    """Return the kind of a unit, an article, or of words that are a number; else ""."""
    token, after = tokens[at], tokens[at + 1]
    is_unit = token.text in UNIT_LETTERS or token.text.lower() in UNITS
    if is_unit and before[-1:] and before[-1] in "nu/j*":
        return "u", at + 1 + _exponent(tokens, at + 1), None
    words = [each.text if each.kind == "word" else "" for each in tokens[at : at + 12]]
    if number := spelled(words):
        return "n", at + number[1], Value(number[0], str(number[0]))
    is_article = token.text in ("a", "A", "I") and (
        after.kind == "word" or (before and after is END)
    )
    return kind_of(token.text) if is_article else "", at + 1, None


def _value(
    tokens: list[Token], at: int, before: str, has_decimal_commas: bool
) -> tuple[str, int, Value | None]:
    """Return the kind of the value that begins at a token: n, e, q or P; "" if none begins."""
    token, read = tokens[at], value_at(tokens, at, has_decimal_commas=has_decimal_commas)
    if read is None:
        return "", at + 1, None
    value, end = read
    if token.text == "(" and token.has_gap and re.search("n[umfV]*$", before):
        return "P", end, value
    if end == at + 1 and token.kind == "word" and len(token.text) == 1:
        return "q", end, value
    if value.number is None:
        return "e", end, value
    is_part = tokens[end].text.lower() in PARTS  # 18 halves
    return ("e", end, value._replace(number=None)) if is_part else ("n", end, value)


def _kind(tokens: list[Token], at: int) -> str:
    """Return the kind of a token that begins no value; " " for an ornament."""
    token, after = tokens[at], tokens[at + 1]
    if token.kind == "word":
        before = tokens[at - 1].text if at else ""
        if token.text == "up" and (after.text != "to" or before in ("add", "adds", "ends", "sums")):
            return "f"
        if token.text == "rather" and before == "or":
            return "k"
        if token.text.lower() == "no" and (after.text == "," or kind_of(after.text) == "k"):
            return "k"
        if (token.text, after.text) in (("left", "with"), ("amount", "to")):
            return "v"
        kind = kind_of(token.text)
        return "V" if kind == "u" and may_be_verb(token.text) else kind
    is_counted = tokens[at - 1].kind == after.kind == "number"
    if token.text in ("...", "…") and (is_counted or not after.has_gap):  # 42...43
        return "z"
    if token.text in _SIGNS or token.kind == "line":
        return _SIGNS.get(token.text, "L")
    if token.kind != "sign":
        return "z" if token.kind == "command" else "e"
    if token.text == "'" and after.kind == "word" and not (token.has_gap or after.has_gap):
        return "z"  # 37's square
    is_known = token.text.isascii() or unicodedata.category(token.text) in ("Sm", "Po")
    return "z" if is_known and token.text not in "'#@" else " "


def _kinds(parts: list[Part]) -> str:
    return "".join(part.kind for part in parts)


def kinds_of(text: str) -> str:
    """Return the line of a plain text."""
    return _kinds(parts_of(text))


def _exponent(tokens: list[Token], at: int) -> int:
    """Return how many tokens raise a unit to its power: cm^2, m^{3}."""
    texts = [token.text for token in tokens[at : at + 4]]
    if texts[:2] == ["^", "{"]:
        return 4 if texts[3:] == ["}"] else 0
    return 2 if texts[:1] == ["^"] and texts[1:] and texts[1].isdigit() else 0


def _is_sign(token: Token, after: Token, before: str) -> bool:
    """Return whether a minus or plus belongs to the number behind it: x is -5, but eggs - 5."""
    if after.has_gap:
        return before[-1] in "bfva=(:,|soyTL"
    return token.has_gap or before[-1] in "=(:,|L"


def _with_denials(line: str) -> str:
    """Return a line with D for each value that is denied, and f for what denies it."""
    kinds = list(line)
    denying = -1
    for at, kind in enumerate(line):
        if kind in "neP":
            if denying >= 0:
                kinds[at], kinds[denying] = "D", "f"
                goes_on = re.compile(f"{UNIT},?[rc][fa]*(?=[ne])").match(line, at + 1)
                denying = goes_on.end() - 1 if goes_on else -1
            elif found := _DENIED.match(line, at + 1):
                kinds[at : found.end()] = "D" + "f" * (found.end() - at - 1)
        elif kinds[at] in "dN" and line[at + 1 : at + 2] != ",":
            denying = at
        elif kind in ".;L!?" or (kind == ":" and line[at + 1 : at + 2] in "sy"):
            if kind == ":" and denying >= 0:  # that is wrong: it is 20
                kinds[denying] = "f"
            denying = -1
    return "".join(kinds)


# -- its answer ------------------------------------------------------------------------------------


class Reading(NamedTuple):
    """What a sentence gives as its answer: one value, or those of a list.

    `equations`: LaTeX of the equation in which each stands, or of the value alone. Both are empty
    where the sentence leaves open what it says.
    """

    values: tuple[Value, ...] = ()
    equations: tuple[str, ...] = ()


_LEFT_OPEN = Reading()


def read(text: str, *, is_answer: bool, has_decimal_commas: bool = False) -> Reading | None:
    """Return what a text gives as its answer; None if it names no value, or only denies some.

    `is_answer`: the text stands behind "The answer is"; else it is any sentence. Where a text has a
    box, its answer is what the box holds, with what stands beside it.
    """
    text = plain(text)
    parts = parts_of(text, has_decimal_commas=has_decimal_commas)
    line = _without_repetitions(_with_denials(_kinds(parts)), parts)
    if BOX_START not in text:
        return _Sentence(parts, line).read(0, len(line), is_answer=is_answer)
    start, end = text.find(BOX_START), text.rfind(BOX_END)
    inside = [at for at, part in enumerate(parts) if part.end > start and part.start < end]
    if not inside:
        return None
    if _TOUCHED.search(text):
        return _LEFT_OPEN
    first, last = inside[0], inside[-1] + 1
    right = re.sub(r"^[,;]?c?(?=[qu]=)", ".", line[last:])
    reading = _Sentence(parts, line).read(first, last, is_answer=True)
    is_listed = _ANOTHER.search(line[:first]) or _OTHERS.match(right)
    is_alone = is_left(line[:first]) and is_right(right) and not is_listed
    if reading is None or is_alone:
        return reading
    return _LEFT_OPEN


def is_left(line: str, *, is_alone: bool = False) -> bool:
    fits = _LEFT.search(line) or (is_alone and _LEFT_ALONE.search(line))
    return bool(fits) and not _SPOILED.search(line)


def is_right(line: str) -> bool:
    return bool(_RIGHT.match(line)) and not _TAKEN_BACK.search(line)


class _Sentence:
    def __init__(self, parts: list[Part], line: str) -> None:
        self.parts = parts
        self.line = line

    def read(self, start: int, end: int, *, is_answer: bool) -> Reading | None:
        line = self.line[start:end]
        if not re.search("[ne]", line):
            if "D" in line or not is_answer or not re.fullmatch("[fabm:=L]*q[.!L]*", line):
                return None
            return self._reading([start + line.index("q")])
        if re.search(r"\?[.!)L]*$", line):
            return _LEFT_OPEN
        first = re.search("[ne]", line)
        assert first
        if is_answer and LEAD.fullmatch(line, 0, first.start()):
            return self._first(start + first.start(), end)
        return self._last(start, end)

    def _first(self, at: int, end: int) -> Reading:
        """Read the value that begins an answer, its list, or the result of its equation."""
        chosen = [at]
        while found := _OTHERS.match(self.line, chosen[-1] + 1, end):
            chosen.append(found.end())
        if is_right(self.line[chosen[-1] + 1 : end]):
            return self._reading(chosen)
        equals = self.line.rfind("=", at, end)
        if equals < 0:
            return _LEFT_OPEN
        result = re.compile("[fa]*[ne]").match(self.line, equals + 1, end)
        if result is None or not is_right(self.line[result.end() : end]):
            return _LEFT_OPEN
        is_first = re.compile(f"{UNIT}=").match(self.line, at + 1, end)  # 18 = 9 * 2
        if is_first and self.line[at] == "n" and self.line[result.end() - 1] == "e":
            return self._reading([at])
        return self._reading([result.end() - 1])

    def _last(self, start: int, end: int) -> Reading:
        """Read the last value of a sentence, or those of a list that ends with it."""
        line = self.line[start:end]
        told = re.sub(r"\([^()]*\)", lambda found: re.sub("[ne]", "f", found[0]), line)
        places = [found.start() for found in re.finditer("[ne]", told)] or [
            found.start() for found in re.finditer("[ne]", line)
        ]
        at = len(places) - 1
        if not is_right(line[places[-1] + 1 :]):
            return _LEFT_OPEN
        while at and (found := _OTHERS.match(line, places[at - 1] + 1)):
            if found.end() != places[at]:
                break
            at -= 1
        gap = line[places[at - 1] + 1 : places[at]] if at else "="
        if _RANGE.fullmatch(gap) and not re.search("[umV]V[fa]*$", gap):
            return _LEFT_OPEN
        if not is_left(line[: places[at]], is_alone=len(places) == 1):
            return _LEFT_OPEN
        return self._reading([start + place for place in places[at:]])

    def _reading(self, chosen: list[int]) -> Reading:
        values = tuple(value for at in chosen if (value := self.parts[at].value))
        if len(values) < len(chosen):  # a date, a version: no value
            return _LEFT_OPEN
        return Reading(values, tuple(self._equation(at) for at in chosen))

    def _equation(self, at: int) -> str:
        sides: list[str] = []
        while value := self.parts[at].value:
            sides.insert(0, value.latex)
            left = _EQUALS.search(self.line[:at])
            if left is None:
                break
            at = left.start(1)
        return " = ".join(sides)


def _without_repetitions(line: str, parts: list[Part]) -> str:
    """Return a line without a number that is the one before it in other words: 1/2, or 0.5."""
    kinds = list(line)
    places = [found.start() for found in re.finditer("n", line)]
    for one, other in pairwise(places):
        gap = line[one + 1 : other]
        left, right = parts[one].value, parts[other].value
        if left and right and re.fullmatch(rf"{UNIT},?r[fa]*", gap) and _are_same(left, right, gap):
            kinds[one + 1 : other + 1] = ["f"] * (other - one)
    return "".join(kinds)


def _are_same(left: Value, right: Value, gap: str) -> bool:
    one, other = (
        each.number / 100 if each.is_percent else each.number
        for each in (left, right)
        if each.number is not None
    )
    if one == other:
        return True
    if not re.search("[uV]", gap) or not one or not other:
        return False
    return max(one / other, other / one) in _UNIT_RATIOS  # 90 minutes or 1.5 hours
