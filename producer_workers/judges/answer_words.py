"""The words that stand around an answer, by what they do to it; `answer_grammar` has the rules.

A word that is not here is a name: of a unit, a person, a thing.
"""

from __future__ import annotations

from fractions import Fraction

_WORDS = {
    # changes nothing
    "f": "the a an this these those my our your his its their her all each only just exactly them "
    "precisely simply indeed clearly still also obviously certainly definitely surely final correct "
    "right numerical exact equal overall altogether left remaining required needed now here "
    "there again both finally ultimately us usd eur gbp inr cad aud rs rs. yes ok okay option him "
    "choice me given whole new full same really in-total der die das le la les el los il lo um uma "
    "une ein eine",
    # an approximation
    "a": "about approximately approx approx. roughly around circa ca ca. etwa ungefähr environ",
    # links an answer to what it is the answer of
    "b": "is are was were be been being equals become becomes means ist sind beträgt ergibt lautet "
    "est sont vaut donne égale es son è é são равен равно wynosi",
    # gives an amount, as verbs in -s and -ed do
    "v": "get got have had has make made take took read cost pay paid find found give gave sell "
    "sold spend spent see saw buy bought leave leaves need save earn win won lose lost eat ate drive "
    "drove run ran come came go went keep kept hold held owe reach weigh drink drank bring brought "
    "build built grow grew do did obtain conclude compute having getting giving leaving making "
    "yielding totaling require travel receive collect score contain yield kostet",
    # a verb stands behind it
    "s": "i we you he she it they will can must should would to who",
    # names of amounts, which may stand before or behind them
    "m": "answer answers ans result results sum difference value amount number solution area price "
    "cost profit volume length height width distance speed rate age weight mass perimeter average "
    "mean median remainder probability balance output total count income revenue point interval set pair "
    "vector matrix antwort ergebnis réponse résultat respuesta resultado risposta risultato ответ",
    "o": "of",
    # prepositions: with another number behind them, they make another amount, or only tell more
    "p": "from by into with than through",
    "i": "in at for after on during among when while until before",
    "j": "per pro par por",
    # denies
    "d": "not never no neither nor without unlike except excluding excludes wrong incorrect false "
    "instead rather unknown unclear nobody nothing none hardly impossible invalid mistaken guess "
    "guessing unsure uncertain doubt other anything everything trap tempting nicht kein keine pas",
    "N": "cannot",
    # leaves open
    "r": "or either maybe perhaps possibly probably might may could between if whether suppose "
    "supposing assuming assume unless versus vs vs. oder ou o",
    # behind a number, makes another one of it
    "x": "times plus minus less more fewer greater least most over under above below beyond short "
    "shy squared cubed factorial choose mod modulo divided multiplied halved doubled tripled point "
    "too up down off nearly almost close base percent percentage",
    # takes back
    "k": "wait sorry oops correction hmm actually mean meant scratch",
    # begins a sentence in a sentence
    "y": "because since which that where so thus therefore hence then i.e. i.e e.g. namely as whereas "
    "donc also",
    "w": "but sondern",
    "c": "and et und & y",
}
KINDS = {word: kind for kind, words in _WORDS.items() for word in words.split()}
"""What a word does, as one letter: a rule is a regular expression over the kinds of a sentence."""

_NO_VERBS = frozenset(
    "pages steps chapters exceeds exceeded excludes excluded lacks misses missed rejected rejects "
    "refuted ruled avoids avoided doubles triples halves divides divided approaches approached "
    "always perhaps surpasses surpassed differs precedes follows outside besides multiplies".split()
)


def kind_of(word: str) -> str:
    """Return the kind of a word; u for a name."""
    lower = word.lower()
    if kind := KINDS.get(lower):
        return kind
    start, _, end = lower.rpartition("'")
    if end == "t":
        return "N"
    if end in ("s", "re", "ve", "ll", "d", "m"):
        return "b" if end == "s" and KINDS.get(start) in ("s", "y", "f") else "u"
    return "u"


def may_be_verb(word: str) -> bool:
    """Return whether a name before an amount may be a verb: plants 18, planted 18."""
    return word.endswith(("s", "ed")) and word not in _NO_VERBS


# -- numbers in words ------------------------------------------------------------------------------

_ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen"
)
_VALUES = {word: value for value, word in enumerate(_ONES.split())} | {
    word: 10 * value
    for value, word in enumerate("twenty thirty forty fifty sixty seventy eighty ninety".split(), 2)
}
SCALES = {"hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9} | {
    "trillion": 10**12, "dozen": 12, "lakh": 10**5, "crore": 10**7, "k": 1000, "mn": 10**6,
    "bn": 10**9, "millionen": 10**6, "mille": 1000, "millones": 10**6,
}  # fmt: skip
PARTS = {"half": 2, "halves": 2} | {
    f"{word}{end}": part
    for word, part in {
        "third": 3, "quarter": 4, "fourth": 4, "fifth": 5, "sixth": 6, "seventh": 7, "eighth": 8,
        "ninth": 9, "tenth": 10, "twelfth": 12, "hundredth": 100, "thousandth": 1000,
    }.items()
    for end in ("", "s")
}  # fmt: skip


def spelled(words: list[str]) -> tuple[Fraction, int] | None:
    """Return the number that begins a list of words in lower case, and how many words say it.

    number = [minus] (half | whole [part] | whole "and" (a | one…nine) part): two and a half
    """
    sign = -1 if words[:1] == ["minus"] else 1
    at = int(sign < 0)
    if words[at : at + 1] == ["half"]:
        return Fraction(sign, 2), at + 1
    whole, end = _whole(words, at)
    if whole is None:
        return None
    part = PARTS.get(words[end]) if end < len(words) else None
    if part and whole:
        return Fraction(sign * whole, part), end + 1
    if words[end : end + 1] == ["and"] and end + 2 < len(words) and words[end + 2] in PARTS:
        over = _VALUES.get(words[end + 1].replace("a", "one") if words[end + 1] == "a" else words[end + 1], 0)
        return sign * (whole + Fraction(over, PARTS[words[end + 2]])), end + 3
    return Fraction(sign * whole), end


def _whole(words: list[str], at: int) -> tuple[int | None, int]:
    """Return the whole number at a word, or None, and the place behind it: one hundred and twelve."""
    total, below, room = 0, 0, 0  # room: what may be added below, 100 at first and 10 behind twenty
    is_number = False
    while at < len(words):
        word = words[at]
        after = words[at + 1] if at + 1 < len(words) else ""
        values = [_VALUES.get(part) for part in word.split("-")]
        if word in ("a", "an") and not is_number and (after in PARTS or len(after) > 2 and after in SCALES):
            below, room, is_number = 1, 0, True
        elif None not in values:
            for value in values:
                assert value is not None
                if is_number and value >= room:
                    return (None, at)
                below, room = below + value, 10 if value >= 20 else 0
                is_number = True
        elif is_number and len(word) > 2 and word in SCALES and below:
            if word == "hundred":
                below, room = below * 100, 100
            else:
                total, below, room = total + below * SCALES[word], 0, 1000
        elif not (word == "and" and room >= 100 and after.partition("-")[0] in _VALUES):
            break
        at += 1
    return (total + below if is_number else None), at


# -- mathematics -----------------------------------------------------------------------------------

FUNCTIONS = {
    name: f"\\{name}"
    for name in (
        "sqrt sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln exp max min gcd det"
    ).split()
} | {"asin": "\\arcsin", "acos": "\\arccos", "atan": "\\arctan", "lg": "\\log"}
CONSTANTS = {
    name: f"\\{name}"
    for name in (
        "alpha beta gamma delta epsilon theta lambda mu rho sigma tau phi omega pi infty emptyset"
    ).split()
} | {
    "infinity": "\\infty", "inf": "\\infty", "oo": "\\infty", "varnothing": "\\emptyset",
    "varphi": "\\phi", "varepsilon": "\\epsilon", "Delta": "\\Delta",
}  # fmt: skip

UNIT_LETTERS = frozenset("msghlLCFWVNJK")
UNITS = frozenset(
    "cm mm km kg mg ml dl cl ft in lb lbs oz mi hr hrs min mph yd st nd rd th am pm kmh kw kwh hz "
    "khz mhz ghz gb mb kb tb ms ns px pt pts deg rad mol pa kpa kj kcal cal ev sec secs ohm kohm "
    "mohm gal qt yr yrs wk µm µs µg".split()
)
