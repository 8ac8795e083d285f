"""The words that stand around an answer, by what they do to it; `answer_grammar` has the rules.

A word that is not here is a name: of a unit, a person, a thing.
"""

from __future__ import annotations

import re
from fractions import Fraction

# A word's kind is one letter, so that a rule is a regular expression over the kinds of a sentence.
_KINDS = """
f changes nothing:
    the a an this these those my our your his its their her all each only just exactly precisely
    simply indeed clearly still also obviously certainly definitely surely final correct right
    numerical exact equal overall altogether left remaining required needed now here there again
    both finally ultimately us usd eur gbp inr cad aud rs rs. yes ok okay option choice him them
    me given whole new full same really out der die das le la les el los il lo um uma une ein eine
    de du
a an approximation:
    about approximately approx approx. roughly around circa ca ca. etwa ungefähr environ
b links an answer to what it is the answer of:
    is are was were be been being equals become becomes means ist sind beträgt ergibt lautet est
    sont vaut donne égale es son è é são равен равно wynosi
v gives an amount, as verbs in -s and -ed do:
    get got have had has make made take took read cost pay paid find found give gave sell sold
    spend spent see saw buy bought leave leaves need save earn win won lose lost eat ate drive
    drove run ran come came go went keep kept hold held owe reach weigh drink drank bring
    brought build built grow grew do did obtain conclude compute having getting giving leaving
    making yielding totaling require travel receive collect score contain yield kostet
s has a verb behind it:
    i we you he she it they will can must should would who
T to
m names an amount, before or behind it:
    answer answers ans result results sum difference value amount number solution area price
    cost profit volume length height width distance speed rate age weight mass perimeter average
    median remainder probability balance output total count income revenue interval set pair
    vector matrix antwort ergebnis réponse résultat respuesta resultado risposta risultato ответ
o of
p makes another amount with the number behind it: from by into with than through
i tells more of an amount: in at for on during among when while
t tells what is on one side of an amount: after before until over
j joins two units: per pro par por
d denies:
    not never no neither nor without unlike except excluding excludes wrong incorrect false
    instead rather unknown unclear nobody nothing none hardly impossible invalid mistaken guess
    guessing unsure uncertain doubt other trap tempting nicht kein keine pas
N denies, as a verb: cannot
r leaves open:
    or either maybe perhaps possibly probably might may could between if whether suppose
    supposing assuming assume unless versus vs vs. oder ou o
M tells a difference, 18 more apples, but makes another amount in 18 more than 30: more less fewer
x makes another amount of the number before it:
    times plus minus greater least most under above below beyond short shy squared cubed
    factorial choose mod modulo divided multiplied halved doubled tripled point too up down off
    nearly almost close base hexadecimal binary octal percent percentage
k takes back what was said: wait sorry oops correction hmm actually mean meant scratch
y begins a sentence in a sentence:
    because since which that where so thus therefore hence then i.e. i.e e.g. namely as whereas
    donc
w but sondern
c and et und y
"""
KINDS: dict[str, str] = {
    word: kind
    for kind, words in re.findall(r"^(\w)(?: .*:)?\s([^:]*?)(?=\n\w|\n\Z)", _KINDS, re.MULTILINE)
    for word in words.split()
}
_NO_VERBS = """
    pages steps chapters exceeds exceeded excludes excluded lacks misses missed rejected rejects
    refuted ruled avoids avoided doubles triples halves divides divided approaches approached always
    perhaps surpasses surpassed differs precedes follows outside besides multiplies
"""
_IDEOGRAMS = re.compile("[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]")  # words without spaces
_DENIES = re.compile("[不没沒非未]|아니|ない")
_LINKS = ("是", "为", "為", "于", "於", "は", "が", "은", "는")


def kind_of(word: str) -> str:
    """Return the kind of a word; u for a name."""
    lower = word.lower()
    if kind := KINDS.get(lower):
        return kind
    if lower in SCALES or lower in PARTS:
        return "x"
    if _IDEOGRAMS.search(lower):
        return "N" if _DENIES.search(lower) else "b" if lower.endswith(_LINKS) else "u"
    start, _, end = lower.rpartition("'")
    if end == "t":
        return "N"
    return "b" if end == "s" and KINDS.get(start) in ("s", "y", "f") else "u"


def may_be_verb(word: str) -> bool:
    """Return whether a name before an amount may be a verb: plants 18, planted 18."""
    return word.endswith(("s", "ed")) and word not in _NO_VERBS.split()


# -- numbers in words ------------------------------------------------------------------------------

_ONES = """
    zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen
    sixteen seventeen eighteen nineteen
"""
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
_ORDINALS = "third quarter fifth sixth seventh eighth ninth tenth"
VALUES = {word: value for value, word in enumerate(_ONES.split())}
VALUES |= {word: 10 * value for value, word in enumerate(_TENS.split(), 2)}
SCALES = {"hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9} | {
    "trillion": 10**12, "dozen": 12, "lakh": 10**5, "crore": 10**7, "k": 1000, "mn": 10**6,
    "bn": 10**9, "millionen": 10**6, "mille": 1000, "millones": 10**6,
}  # fmt: skip
_PARTS = {**{word: part for part, word in enumerate(_ORDINALS.split(), 3)}, "fourth": 4} | {
    "twelfth": 12, "hundredth": 100, "thousandth": 1000,
}  # fmt: skip
PARTS = {"half": 2, "halves": 2, **_PARTS, **{f"{word}s": part for word, part in _PARTS.items()}}


def spelled(words: list[str]) -> tuple[Fraction, int] | None:
    """Return the number that begins a list of words, and how many words say it.

    number = [minus] (half | whole [part] | whole "and" (a | one…nine) part): two and a half
    """
    said = [part for word in words for part in word.lower().split("-")]
    sign = -1 if said[0] in ("minus", "negative") else 1
    at = int(sign < 0)
    whole, end = _whole(said, at)
    behind = said[end : end + 3]
    value: Fraction | int | None = whole
    if said[at : at + 1] == ["half"]:
        value, end = Fraction(1, 2), at + 1
    elif whole and behind[:1] and behind[0] in PARTS:
        value, end = Fraction(whole, PARTS[behind[0]]), end + 1
    elif whole and behind[:1] == ["and"] and behind[2:] and behind[2] in PARTS:
        over = 1 if behind[1] in ("a", "an") else VALUES.get(behind[1], 0)
        value, end = whole + Fraction(over, PARTS[behind[2]]), end + 3
    count = 0
    while end > 0:
        end -= words[count].count("-") + 1
        count += 1
    return (sign * Fraction(value), count) if value is not None and end == 0 else None


def _whole(said: list[str], at: int) -> tuple[int | None, int]:
    """Return the whole number at a place, and the place behind it: one hundred and twelve."""
    total, below, room = 0, 0, 0  # room: below what a number may be added, 100 or 10
    is_number = False
    while at < len(said):
        word, after = said[at], said[at + 1] if at + 1 < len(said) else ""
        is_one = after in PARTS or (after in SCALES and len(after) > 2)  # a hundred, a third
        if word in ("a", "an") and not is_number and is_one:
            below, is_number = 1, True
        elif (value := VALUES.get(word)) is not None:
            if is_number and value >= room:
                return None, at
            below, room, is_number = below + value, 10 if value >= 20 else 0, True
        elif below and len(word) > 2 and word in SCALES:
            if word == "hundred":
                below, room = below * 100, 100
            else:
                total, below, room = total + below * SCALES[word], 0, 1000
        elif not (word == "and" and room >= 100 and after in VALUES):
            break
        at += 1
    return (total + below if is_number else None), at


# -- mathematics -----------------------------------------------------------------------------------

_FUNCTIONS = """
    sqrt sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln exp max min gcd det
"""
_CONSTANTS = """
    alpha beta gamma delta epsilon theta lambda mu rho sigma tau phi omega pi infty emptyset
"""
FUNCTIONS = {name: f"\\{name}" for name in _FUNCTIONS.split()} | {
    "asin": "\\arcsin", "acos": "\\arccos", "atan": "\\arctan", "lg": "\\log",
}  # fmt: skip
CONSTANTS = {name: f"\\{name}" for name in _CONSTANTS.split()} | {
    "infinity": "\\infty", "inf": "\\infty", "oo": "\\infty", "varnothing": "\\emptyset",
    "varphi": "\\phi", "varepsilon": "\\epsilon", "Delta": "\\Delta",
}  # fmt: skip

UNIT_LETTERS = frozenset("msghlLCFWVNJK")
_UNITS = """
    cm mm km kg mg ml dl cl ft lb lbs oz mi hr hrs min mph yd st nd rd th am pm kmh kw kwh hz khz
    mhz ghz gb mb kb tb ms ns px pt deg rad mol pa kpa kj kcal cal ev sec secs ohm kohm mohm gal qt
    yr yrs wk µm µs µg
"""
UNITS = frozenset(_UNITS.split())
