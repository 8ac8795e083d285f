"""Read the answer of a sentence: beside it stands nothing but a unit, an approximation or the end.

A sentence is a line of kinds: a letter for each word (`answer_words`), n for a number, e for another
value, q for a lone letter, P for a number told in brackets, and the signs themselves (L: a new line,
z: a sign of mathematics that belongs to no value). The rules are regular expressions over that line.
What they do not allow is never read: the sentence leaves its answer open, which counts as unparsed.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from producer_workers.judges.answer_values import BOX_END, BOX_START, Token, Value, Values
from producer_workers.judges.answer_values import plain, tokens_of
from producer_workers.judges.answer_words import PARTS, UNIT_LETTERS, UNITS
from producer_workers.judges.answer_words import kind_of, may_be_verb, spelled

# -- the rules -------------------------------------------------------------------------------------

UNIT = r"(?:[-/j]?[umfV]){0,9}"
_CLOSE = r"(?:$|[.,;!)L|(P])"
JOIN = r"(?:[,;]?[cr]|[,;])[fa]*(?:[qu]=)?"

# between "The answer is" and the answer
LEAD = re.compile(r"(?:[fabmovsyj,:.=(|L-]|[eqnumfV]{1,4}=)*")
# to the left of an answer, and what spoils it there
_LEFT = re.compile(r"(?:^|[,;:.!?()L|=yw-]|b|v|V|su|[vVb][spi]|[vV]xp?|m|mo)[fak]*$")
_LEFT_ALONE = re.compile(r"i[fa]*$")  # "in 18 days", where no other number is
_SPOILED = re.compile(
    r"[dN][^.;L!?]*$ | r[^,;.(L!?wy]*$ | [xpoi][fa]*[:,(=L-]+[fa]*$", re.VERBOSE
)
# to the right of an answer
_RIGHT = re.compile(
    rf"""{UNIT}(?: $ | [.!;:)L|(P-] | ,(?!c?[qu]{{1,2}}=) | y | [ipo](?![fa]*[ne]) | i[fa]*n
      | b[fa]*m | b[fa]+(?:{_CLOSE}|[iyc]) | c?f?D | c?[fd][fp]*D | ,?w(?![^.;L]*[ne])
      | c(?![fasvb]*[neq]) | [svV](?![^.;,L]*[ne]) )""",
    re.VERBOSE,
)
_OTHERS = re.compile(rf"{UNIT}{JOIN}(?=[ne]{UNIT}(?:{_CLOSE}|{JOIN}))")  # 1, 2 and 3
_RANGE = re.compile(rf"{UNIT}(?:[p-]|[,;]?r)?[fasvbr]*")  # 17 to 18
_EQUALS = re.compile(rf"([neq]){UNIT}=[fa]*$")
_TAKEN_BACK = re.compile(r"k[^ne]*[ne]|r[fasvb]*n")
_DENIED = re.compile(rf"[umfV]{{0,4}}(?:N|[bsv]{{1,3}}[fa]?(?:d|x(?={_CLOSE}))|d(?=$|[.,;!)L]))")

_SIGNS = {sign: sign for sign in "=,;.?!()|/:-"} | {"…": ".", "...": ".", "--": "-", "---": "-", "~": "a"}
_SIGNS |= {"[": "(", "{": "(", "\\{": "(", "]": ")", "}": ")", "\\}": ")", "\\|": "|", "&": "c"}
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
    values = Values(tokens, has_decimal_commas=has_decimal_commas)
    found: list[Part] = []
    at = 0
    while at < len(tokens):
        kind, end, value = _part(tokens, at, values, found)
        if kind:
            found.append(Part(kind, tokens[at].start, tokens[end - 1].end, value))
        at = end
    return found


def _part(
    tokens: list[Token], at: int, values: Values, found: list[Part]
) -> tuple[str, int, Value | None]:
    """Return the kind of the part at a token, the place behind it, and its value."""
    token, after = tokens[at], tokens[at + 1] if at + 1 < len(tokens) else None
    before = found[-1].kind if found else ""
    is_word = token.kind == "word"
    if is_word and before and before in "nu/j" and (token.text in UNIT_LETTERS or token.text.lower() in UNITS):
        return "u", at + 1 + _exponent(tokens, at + 1), None
    if is_word and after and after.kind == "word" and token.text in ("a", "A", "I"):
        number = spelled([token.text.lower(), after.text.lower()])
        if number is None:
            return kind_of(token.text), at + 1, None
    if is_word:
        words = [each.text.lower() if each.kind == "word" else "" for each in tokens[at : at + 12]]
        if number := spelled(words):
            return "n", at + number[1], Value(number[0], str(number[0]))
    if token.text in ("-", "+") and before and not _is_sign(token, after, before):
        return "-" if token.text == "-" else "z", at + 1, None
    if read := values.value(at):
        value, end = read
        kind = "e" if value.number is None else "n"
        if end == at + 1 and is_word and len(token.text) == 1:
            kind = "q"
        elif kind == "n" and end < len(tokens) and tokens[end].text.lower() in PARTS:
            kind = "e"  # 18 halves
        elif token.text == "(" and token.has_gap and re.search("n[umfV]{0,6}$", _kinds(found)):
            kind = "P"
        return kind, end, value
    if is_word:
        kind = kind_of(token.text)
        if token.text.lower() == "no" and after and after.text == ",":
            kind = "k"
        return "V" if kind == "u" and may_be_verb(token.text) else kind, at + 1, None
    if token.kind == "line":
        return "L", at + 1, None
    if token.text in ("...", "…") and after and not after.has_gap:  # 42...43
        return "z", at + 1, None
    if token.text in _SIGNS:
        return _SIGNS[token.text], at + 1, None
    if token.kind != "sign":
        return "z" if token.kind == "command" else "e", at + 1, None
    is_ornament = token.text in "'#@" or not (token.text.isascii() or token.text in "‰′″°±")
    return "" if is_ornament else "z", at + 1, None


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


def _is_sign(token: Token, after: Token | None, before: str) -> bool:
    """Return whether a minus or plus belongs to the number behind it: x is -5, but eggs - 5."""
    if after is None:
        return False
    if after.has_gap:
        return before in "bfva=(:,|soyL"
    return token.has_gap or before in "=(:,|L"


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
        elif kinds[at] in "dN":
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
    first, last = inside[0], inside[-1] + 1
    right = re.sub(r"^[,;]?c?(?=[qu]=)", ".", line[last:])
    reading = _Sentence(parts, line).read(first, last, is_answer=True)
    if reading is None or is_left(line[:first]) and is_right(right):
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
        """Read the value that begins an answer, those of its list, or the result of its equation."""
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
        if at and _RANGE.fullmatch(line, places[at - 1] + 1, places[at]):
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
        sides = []
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
    for one, other in zip(places, places[1:], strict=False):
        gap = line[one + 1 : other]
        left, right = parts[one].value, parts[other].value
        if left and right and re.fullmatch(rf"{UNIT},?r[fa]*", gap) and _are_same(left, right, gap):
            kinds[one + 1 : other + 1] = ["f"] * (other - one)
    return "".join(kinds)


def _are_same(left: Value, right: Value, gap: str) -> bool:
    one, other = (each.number / 100 if each.is_percent else each.number for each in (left, right) if each.number is not None)
    if one == other:
        return True
    if not re.search("[uV]", gap) or not one or not other:
        return False
    return max(one / other, other / one) in _UNIT_RATIOS  # 90 minutes or 1.5 hours
