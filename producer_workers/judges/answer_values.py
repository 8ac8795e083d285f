r"""Read values as models write them: numbers in any style, and mathematics, as exact LaTeX.

    value   = sum {relation sum}
    sum     = [sign] product {(+ | - | ± | ∪ …) product}
    product = power {[* | /] power}
    power   = primary {^ argument | _ argument | ! | ° | %}
    primary = number [scale] | letter | function | \frac{sum}{sum} | (sum {, sum}) | |sum|

Each function reads at one place and goes back at most once, and to a bounded depth, so that the
time is bounded by the length of the text (`answers` cuts it at 1,000 characters).
"""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction
from typing import NamedTuple

from producer_workers.judges.answer_words import CONSTANTS, FUNCTIONS, SCALES, UNIT_LETTERS, UNITS

# -- plain text ------------------------------------------------------------------------------------


class _Characters(dict[int, str]):
    """Give each character as ASCII where it only looks different: other digits, wide letters."""

    def __missing__(self, code: int) -> str:
        found = char = chr(code)
        kind = unicodedata.category(char)
        if char.isdecimal():
            found = str(unicodedata.decimal(char))
        elif kind in ("Zs", "Sc", "Pi", "Pf", "So", "Sk", "Mn", "Cf"):  # spaces, currency, quotes …
            found = "" if kind in ("Cf", "Mn") else " "
        elif unicodedata.decomposition(char).startswith(("<fraction>", "<wide>", "<font>")):
            found = unicodedata.normalize("NFKC", char).replace("\u2044", "/")
            found = f" {found}" if kind == "No" else found
        self[code] = found
        return found


_CHARACTERS = _Characters()
for _names, _text in {
    "\u2010 \u2011 \u2012 \u2013 \u2212 \ufe63 \uff0d": "-", "\u2014 \u2015": " --- ",
    "× · ⋅ ∙ ✕ ✖ ∗": "*", "÷ ∕ \u2044": "/", "≈ ≃ ≅ ∼ ⇒ → ⟹ ⟶ ➡ ➜ ⇔": " = ", "∴": " so ",
    "≤ ⩽": "\\le ", "≥ ⩾": "\\ge ", "≠": "\\ne ", "∈": "\\in ", "∞": "\\infty ", "√": "\\sqrt ",
    "∪": "\\cup ", "∩": "\\cap ", "∅": "\\emptyset ", "ℝ": "\\mathbb{R}", "ℤ": "\\mathbb{Z}",
    "ℕ": "\\mathbb{N}", "ℚ": "\\mathbb{Q}", "ℂ": "\\mathbb{C}", "\u2018 \u2019 \u02bc": "'", '"': " ",
    "º ˚": "°", "℃ ℉": "°", "٫": ".", "٬": ",", "، 、 ，": ",", "。 ．": ".", "؛": ";", "‰": "‰",
    "π": "\\pi ", "Ω \u2126": "\\Omega ", "µ μ": "µ", "″ ′": "′",
}.items():  # fmt: skip
    _CHARACTERS |= {ord(each): _text for each in _names.split(" ") if each}
for _code in (*range(128), ord("±"), ord("…"), ord("°")):
    _CHARACTERS.setdefault(_code, chr(_code))
for _greek in "alpha beta gamma delta theta lambda sigma phi omega".split():
    _CHARACTERS[ord(unicodedata.lookup(f"GREEK SMALL LETTER {_greek.replace('lambda', 'lamda')}"))] = (
        f"\\{_greek} "
    )

_RAISED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ₀₁₂₃₄₅₆₇₈₉", "0123456789-+n0123456789")
_WRAPPERS = (
    "text|textbf|textit|textrm|textnormal|texttt|textsf|emph|underline|mathrm|mathbf|mathit|mathsf|"
    "mbox|hbox|boldsymbol|bm|operatorname\\*?|boxed|fbox|num|ensuremath|mathop|tag"
)
_ROW_END = "\ue000"  # stands for \\ of a matrix
FACTORIAL = "\ue001"
GUESS = "\ue002"  # before letters that may be a product, a unit or a word: 18ab
BOX_START, BOX_END = "\ue010", "\ue011"  # which `answers` puts around what a box holds


def _compiled(*rules: tuple[str, str]) -> tuple[tuple[re.Pattern[str], str], ...]:
    return tuple((re.compile(pattern), new) for pattern, new in rules)


_MARKDOWN = _compiled(
    (r"~~[^~\n]{1,200}~~", " "),  # struck out
    (r"<<[^<>\n]{0,80}>>", ""),  # what a calculator was asked
    (r"</?[a-zA-Z][^<>\n]{0,40}>|&nbsp;", " "),
    (r"(?<=\d)!(?=\s?(?:\$|\\[)\]]|\}))", FACTORIAL),  # in a formula, and no exclamation
    (r"(?<=[\w)])\*\*(?=-?\d)", "^"),
    (r"\*{2,3}|__(?!\w)|(?<!\w)__|`|\"", " "),
    (r"(?<![\w*)])\*(?=[^\s*])([^*\n]{1,80})(?<=\S)\*(?![\w*])", r" \1 "),
    (r"(?<![a-zA-Z0-9\\}])_|(?<=\d)_(?=\d{3})|_(?![\w{\\])", ""),
    (r"(?<=[-+±])\s?\\?\$(?=[\d.])", ""),  # -$5
    (r"[-=]>", " = "),
    (r"\{,\}", ","),
    (r"(?i)\b(?:negative|minus)\s+(?=[\d.])", "-"),
)  # fmt: skip
_LATEX = _compiled(
    (r"\\\\", _ROW_END),
    (r"\\(?:left|right|middle|[bB]igg?[lrm]?)\s*(?:\.|(?![a-zA-Z]))", ""),
    (r"\\(?:displaystyle|textstyle|large|Large|small|limits|nolimits|hspace\{[^{}]*\})(?![a-zA-Z])", " "),
    (r"\\!", ""),
    (r"\\[,;:> ()\[\]]|\\q?quad(?![a-zA-Z])|~", " "),
    (r"(?:\^\s*\{?\s*)?\\(?:circ|degree|degrees)(?![a-zA-Z])\s*\}?", "°"),
    (r"\\(?:SI|qty)\s*\{([^{}]*)\}\s*\{([^{}]*)\}", r" \1 \2 "),
    (r"(?<=\d)(\s*[kMG]?)\s?\\Omega(?![a-zA-Z])", r" \1ohm"),
    (r"\\mu(?=\s*(?:\\(?:text|mathrm)\{)?\s*[mgsFLAV]\b)", "µ"),
    (rf"\\(?:{_WRAPPERS})\s*\{{([^{{}}]*)\}}", r" \1 "),
    (rf"\\(?:{_WRAPPERS})\s*\{{([^{{}}]*)\}}", r" \1 "),  # one in another
    (r"\\boxed(?![a-zA-Z])", " "),
    (r"\\(?:dfrac|tfrac|cfrac)(?![a-zA-Z])", r"\\frac"),
    (r"\\frac\s*(\d|\\pi)\s*(\d)", r"\\frac{\1}{\2}"),
    (r"\\frac\s*(\d)\s*\{", r"\\frac{\1}{"),
    (r"(\\frac\s*\{[^{}]*\})\s*(\d)", r"\1{\2}"),
    (r"\\sqrt\s*(\d)", r"\\sqrt{\1}"),
    (r"\\([%_#&*])", r"\1"),
    (r"\\(?:times|cdot|ast)(?![a-zA-Z])", "*"),
    (r"\\(?:div)(?![a-zA-Z])", "/"),
    (r"\\(?:approx|simeq|implies|Rightarrow|rightarrow|iff|to|sim)(?![a-zA-Z])", " = "),
    (r"\\pm(?![a-zA-Z])", "±"),
    (r"\\(?:dots|ldots|cdots)(?![a-zA-Z])", "…"),
    (r"\\(?:therefore)(?![a-zA-Z])", " so "),
    (r"\\\$", " "),
)  # fmt: skip


def plain(text: str) -> str:
    """Return `text` without Markdown, currency signs and the LaTeX that only sets type."""
    if not text.isascii():
        text = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ]+", lambda found: f"^{{{found[0].translate(_RAISED)}}}", text)
        text = re.sub("[₀-₉]+", lambda found: f"_{{{found[0].translate(_RAISED)}}}", text)
        text = text.translate(_CHARACTERS)
    for pattern, new in _MARKDOWN:
        text = pattern.sub(new, text)
    if "\\" in text:
        for pattern, new in _LATEX:
            text = pattern.sub(new, text)
    return text.replace("$", " ")


# -- tokens ----------------------------------------------------------------------------------------

_TOKEN = re.compile(
    rf"""
    (?P<matrix>\\begin\{{[a-z]{{0,9}}(?:matrix|array)\}}.{{1,600}}?\\end\{{[a-z]{{0,12}}\}})
    | (?P<name>\d+(?::\d+)+(?![\w:]) | (?!\d{{1,3}}(?:\.\d{{3}})+(?![\d.]))\d+(?:\.\d+){{2,}}(?!\w)
        | \d{{4}}-\d\d?-\d\d?(?!\d)
        | \d\d?/\d\d?/\d{{2,4}}(?!\d) | [^\W\d_]+\d\w*(?:[-.]\w+)* | [^\W\d_]{{2,}}-\d[\w.-]*(?<!\.))
    | (?P<number>(?:
          \d{{1,3}}(?:\.\d{{3}}){{2,}}(?:,\d+)?(?!\d) | \d{{1,3}}(?:[.\ ']\d{{3}})+,\d+(?![,.]?\d)
        | (?:\d{{1,3}}(?:,\d{{3}})+ | \d{{1,3}}(?:\ \d{{3}})+ | \d{{1,3}}(?:'\d{{3}})+
            | \d{{1,2}}(?:,\d\d)+,\d{{3}})(?!\d|,\d)(?:\.\d+)?
        | \d+,\d+(?!\d|[.,]\d) | \d+(?:\.\d+)? | \.\d+)
        (?:[eE][-+]?\d{{1,3}}(?!\w))?)
    | (?P<command>\\[a-zA-Z]+ | \\[{{}}|])
    | (?P<word>[^\W\d_]+(?:['-][^\W\d_]+)*)
    | (?P<line>\s*\n\s*)
    | (?P<sign>\.{{3}} | -{{2,3}} | <= | >= | != | [^\s{BOX_START}{BOX_END}])
    """,
    re.VERBOSE | re.DOTALL,
)


class Token(NamedTuple):
    """A part of a text; `has_gap`: white space is before it."""

    kind: str
    text: str
    start: int
    end: int
    has_gap: bool


_END = Token("end", "", 0, 0, True)


def tokens_of(text: str) -> list[Token]:
    """Return the tokens of a plain text."""
    found: list[Token] = []
    end = 0
    for match in _TOKEN.finditer(text):
        kind = match.lastgroup or ""
        gap = text[end : match.start()].strip(BOX_START + BOX_END)
        found.append(Token(kind, match[0], match.start(), match.end(), bool(gap)))
        end = match.end()
    return found


# -- values ----------------------------------------------------------------------------------------


class Value(NamedTuple):
    """A number, or None where it is an expression; and its LaTeX.

    `is_literal`: a number as it is written, and no fraction of two. `is_unsure`: 3,14 may be a
    list. `is_list`: several values in brackets.
    """

    number: Fraction | None
    latex: str
    is_percent: bool = False
    is_literal: bool = False
    is_unsure: bool = False

    def equals(self, truth: Value) -> bool:
        """Return whether a number is right.

        50% is right for 50 (a question may ask for a percentage), 50% and 0.5; 0.5% is not right
        for 0.5. If only the truth has the sign, 50 and 0.5 are right for 50%.
        """
        mine, other = self.number, truth.number
        if mine is None or other is None:
            return False
        if self.is_percent == truth.is_percent:
            return mine == other
        if self.is_percent:
            return mine / 100 == other or (mine == other and abs(other) >= 1)
        return mine in (other, other / 100)


Read = tuple[Value, int] | None  # a value, and the place behind it

_DEEPEST = 12  # brackets in brackets
_PLUS = {"+": "+", "-": "-", "±": "\\pm", "\\cup": "\\cup", "\\cap": "\\cap", "\\mp": "\\mp"}
_PLUS |= {"\\setminus": "\\setminus"}
_RELATIONS = {"<": "<", ">": ">", "<=": "\\le", ">=": "\\ge", "!=": "\\ne"} | {
    f"\\{each}": f"\\{each}"
    for each in ("le", "leq", "ge", "geq", "lt", "gt", "ne", "neq", "in", "subset", "subseteq")
}
_PAIRS = {"(": ")]", "[": ")]", "{": "}", "\\{": ("\\}",), "\\lfloor": ("\\rfloor",)}
_PAIRS |= {"\\lceil": ("\\rceil",), "\\langle": ("\\rangle",)}
_ONE_ARGUMENT = frozenset(f"\\{each}" for each in ("overline", "vec", "hat", "bar", "mathbb"))
_TWO_ARGUMENTS = frozenset(("\\frac", "\\binom"))
_RAW = frozenset(("\\int", "\\sum", "\\prod", "\\lim"))  # with bounds, before what they act on


class Values:
    """Reads the values of a text. `has_decimal_commas`: its language writes 3,14 for 3.14."""

    def __init__(self, tokens: list[Token], *, has_decimal_commas: bool = False) -> None:
        self.tokens = [*tokens, _END]
        self._commas = has_decimal_commas
        self._depth = 0
        self._failed: set[int] = set()  # brackets that hold no value

    def value(self, at: int) -> Read:
        """Return the value that begins at a token, with its relations (x < 3), or None."""
        read = self._sum(at)
        while read and (sign := _RELATIONS.get(self.tokens[read[1]].text)):
            right = self._sum(read[1] + 1)
            if right is None:
                break
            read = Value(None, f"{read[0].latex} {sign} {right[0].latex}"), right[1]
        return read

    def _sum(self, at: int) -> Read:
        token = self.tokens[at]
        signs = token.text if token.text in ("+", "-", "±", "\\mp") else ""
        read = self._product(at + bool(signs))
        if read is None:
            return None
        value, at = read
        if signs:
            number = value.number if signs in "+-" else None
            number = -number if signs == "-" and number is not None else number
            sign = "" if signs == "+" else _PLUS[signs]
            value = value._replace(number=number, latex=f"{sign}{value.latex}")
        while sign := _PLUS.get(self.tokens[at].text, ""):
            right = self._product(at + 1)
            if right is None:
                break
            value, at = Value(None, f"{value.latex} {sign} {right[0].latex}"), right[1]
        return value, at

    def _product(self, at: int) -> Read:
        read = self._power(at)
        if read is None:
            return None
        value, at = read
        if mixed := self._mixed(value, at):
            return mixed
        while True:
            token, after = self.tokens[at], self.tokens[at + 1 : at + 2]
            sign = token.text if token.text in ("*", "/") else ""
            if token.text == "x" and value.is_literal and after and after[0].kind == "number":
                sign = "*"
            if not sign and not self._is_factor(value, at):
                return value, at
            right = self._power(at + bool(sign))
            if right is None:
                return value, at
            value, at = _product(value, sign, right[0]), right[1]

    def _mixed(self, value: Value, at: int) -> Read:
        r"""Return 1 1/2 or 1\frac12."""
        whole, token = value.number, self.tokens[at]
        if whole is None or not value.is_literal or whole.denominator > 1 or value.is_percent:
            return None
        if token.text == "\\frac":
            read = self._power(at)
        elif token.kind == "number" and self.tokens[at + 1].text == "/" and token.text.isdigit():
            under = self._primary(at + 2)
            read = under and self._primary(at)
            if read and under:
                read = _product(read[0], "/", under[0]), under[1]
        else:
            return None
        if read is None or read[0].number is None or not 0 < read[0].number < 1:
            return None
        value = Value(whole + read[0].number, f"({value.latex}+{read[0].latex})")
        if self.tokens[read[1]].text == "%":
            return value._replace(is_percent=True), read[1] + 1
        return value, read[1]

    def _is_factor(self, value: Value, at: int) -> bool:
        """Return whether a value goes on without a sign: 2x, 2 \\pi, x(x+1)."""
        token = self.tokens[at]
        if token.kind == "command":
            return token.text not in _RELATIONS and token.text not in _PLUS
        if token.text in FUNCTIONS or token.text in CONSTANTS:
            return True
        if token.kind == "word" and len(token.text) == 1:
            if value.is_literal and token.text in UNIT_LETTERS:
                return self._goes_on(at + 1)
            return not token.has_gap or token.text not in "aAI"
        if token.kind == "word":
            is_unit = value.is_literal and token.text.lower() in UNITS
            return not token.has_gap and len(token.text) <= 3 and not is_unit
        if token.text == "(":
            return not token.has_gap or not value.is_literal
        return token.kind == "number" and not token.has_gap

    def _goes_on(self, at: int) -> bool:
        """Return whether the letter before is a factor and no unit: 18m + 2."""
        token, after = self.tokens[at], self.tokens[at + 1 : at + 2]
        if token.text == "^":
            exponent = after[0].text if after else ""
            return exponent not in ("2", "3", "{")
        return token.text in ("+", "*", "(") or (
            token.text == "-" and bool(after) and after[0].kind in ("number", "command")
        )

    def _power(self, at: int) -> Read:
        read = self._primary(at)
        while read:
            (value, at), token = read, self.tokens[read[1]]
            if token.text in ("^", "_"):
                argument = self._argument(at + 1)
                if argument is None or (token.text == "_" and value.is_literal):  # 42_8
                    return read
                raised = _power(value, argument[0]) if token.text == "^" else None
                latex = f"{value.latex}{token.text}{{{argument[0].latex}}}"
                read = Value(raised, latex, is_literal=raised is not None), argument[1]
            elif token.text == FACTORIAL or (
                token.text == "!" and not token.has_gap and value.number is None
            ):
                read = Value(None, f"{value.latex}!"), at + 1
            elif token.text == "°":
                read = value._replace(latex=f"{value.latex}^\\circ"), at + 1
            elif is_percent := self._percent(at):
                value = value._replace(is_percent=True, latex=f"{value.latex}\\%")
                read = value, at + is_percent
            else:
                return read
        return read

    def _percent(self, at: int) -> int:
        """Return how many tokens say percent."""
        words = [token.text.lower() for token in self.tokens[at : at + 2]]
        if words[0] in ("%", "percent", "pct", "prozent", "percents", "٪"):
            return 1
        two = " ".join(words)
        return 2 * (two in ("per cent", "percentage points", "percentage point", "pour cent"))

    def _argument(self, at: int) -> Read:
        """Return the argument of ^ or _: {sum}, or one token."""
        token = self.tokens[at]
        if token.text == "{":
            read = self._sum(at + 1)
            return (read[0], read[1] + 1) if read and self.tokens[read[1]].text == "}" else None
        if token.text == "-" and self.tokens[at + 1].kind == "number":
            return self._sum(at)
        return self._primary(at)

    def _primary(self, at: int) -> Read:
        token = self.tokens[at]
        if token.kind == "number":
            return self._number(at)
        if token.kind == "matrix":
            return Value(None, token.text.replace(_ROW_END, "\\\\")), at + 1
        if token.text in _PAIRS:
            return self._bracket(at)
        if token.text == "|" and not self.tokens[at + 1].has_gap:
            read = self._deeper(at + 1)
            is_closed = read and self.tokens[read[1]].text == "|"
            return (Value(None, f"|{read[0].latex}|"), read[1] + 1) if read and is_closed else None
        if token.kind == "command":
            return self._command(at)
        if token.text in CONSTANTS:
            return Value(None, CONSTANTS[token.text]), at + 1
        if token.text in FUNCTIONS:
            return self._function(at, FUNCTIONS[token.text])
        if token.kind == "word" and (len(token.text) == 1 or self._is_product(at)):
            letters = " ".join(token.text)
            return Value(None, GUESS + letters if len(letters) > 1 else letters), at + 1
        return None

    def _is_product(self, at: int) -> bool:
        """Return whether a short word is a product of letters, since it touches an operator."""
        token, after = self.tokens[at], self.tokens[at + 1]
        if len(token.text) > 3 or not token.text.isascii():
            return False
        before = self.tokens[at - 1] if at else _END
        is_joined = not token.has_gap and before.kind in ("number", "command", "word")
        return is_joined or (after.text in ("^", "_", "+") and not after.has_gap)

    def _number(self, at: int) -> Read:
        token = self.tokens[at]
        number, is_unsure = _parsed(token.text, self._commas)
        latex = token.text if is_unsure else _written(number)
        value = Value(number, latex, is_literal=True, is_unsure=is_unsure)
        after = self.tokens[at + 1]
        scale = SCALES.get(after.text.lower()) if after.kind == "word" else None
        if scale is None or (len(after.text) == 1 and after.has_gap):
            return value, at + 1
        return value._replace(number=number * scale, latex=_written(number * scale)), at + 2

    def _bracket(self, at: int) -> Read:
        if at in self._failed:
            return None
        opening = self.tokens[at].text
        items: list[Value] = []
        place = at + 1
        if opening == "\\{" and self.tokens[place].text == "\\}":
            return Value(None, "\\emptyset"), place + 1
        while read := self._deeper(place):
            items.append(read[0])
            place = read[1]
            if self.tokens[place].text not in (",", ";"):
                break
            place += 1
        closing = self.tokens[place].text
        if not items or not closing or closing not in _PAIRS[opening]:
            self._failed.add(at)
            return None
        first = items[0]
        inside = ",".join(item.latex for item in items)
        if len(items) == 1 and "," in self.tokens[at + 1].text and place == at + 2:
            inside = self.tokens[at + 1].text  # (5,100) may be a pair
        latex = f"{opening}{inside}{closing}"
        is_group = len(items) == 1 and not first.is_unsure and opening in "([{"
        if is_group:
            latex = f"{{{inside}}}" if opening == "{" else latex
            latex = f"({inside})" if opening + closing == "[]" else latex
            return first._replace(latex=latex, is_literal=False), place + 1
        return Value(None, latex), place + 1

    def _deeper(self, at: int) -> Read:
        if self._depth == _DEEPEST:
            return None
        self._depth += 1
        try:
            return self.value(at)
        finally:
            self._depth -= 1

    def _command(self, at: int) -> Read:
        name = self.tokens[at].text
        if name in _TWO_ARGUMENTS:
            over = self._deeper_argument(at + 1)
            under = over and self._deeper_argument(over[1])
            if not over or not under:
                return None
            top, bottom = over[0], under[0]
            number = None
            if name == "\\frac" and top.number is not None and bottom.number:
                number = top.number / bottom.number
            return Value(number, f"{name}{{{top.latex}}}{{{bottom.latex}}}"), under[1]
        if name == "\\sqrt":
            return self._function(at, name)
        if name in _ONE_ARGUMENT:
            read = self._deeper_argument(at + 1)
            return (Value(None, f"{name}{{{read[0].latex}}}"), read[1]) if read else None
        if name in _RAW:
            return Value(None, name), at + 1
        word = name[1:]
        if word in FUNCTIONS:
            return self._function(at, FUNCTIONS[word])
        return (Value(None, CONSTANTS[word]), at + 1) if word in CONSTANTS else None

    def _deeper_argument(self, at: int) -> Read:
        if self._depth == _DEEPEST:
            return None
        self._depth += 1
        try:
            return self._argument(at)
        finally:
            self._depth -= 1

    def _function(self, at: int, name: str) -> Read:
        r"""Return sqrt(2), \sqrt[3]{2}, or a function before its argument: \sin^2 x."""
        place, root = at + 1, ""
        if name == "\\sqrt":
            if self.tokens[place].text == "[":
                index = self._deeper(place + 1)
                if index is None or self.tokens[index[1]].text != "]":
                    return None
                root, place = f"[{index[0].latex}]", index[1] + 1
            read = self._deeper_argument(place)
            if read is None:
                return None
            inside = read[0].latex
            if self.tokens[place].text == "(":
                inside = inside[1:-1]
            return Value(None, f"{name}{root}{{{inside}}}"), read[1]
        for sign in ("_", "^"):
            if self.tokens[place].text == sign:
                read = self._argument(place + 1)
                if read is None:
                    return None
                root, place = f"{root}{sign}{{{read[0].latex}}}", read[1]
        read = self._deeper_argument(place)
        if read is None:
            return None
        return Value(None, f"{name}{root} {read[0].latex}"), read[1]


def _parsed(text: str, has_decimal_commas: bool) -> tuple[Fraction, bool]:
    """Return a number, and whether it may also be a list: 3,14."""
    digits, _, exponent = text.lower().partition("e")
    digits = digits.replace(" ", "").replace("'", "")
    dots, commas = digits.count("."), digits.count(",")
    is_unsure = False
    if dots and commas:  # the last sign is the decimal one
        thousands = "," if digits.rfind(".") > digits.rfind(",") else "."
        digits = digits.replace(thousands, "").replace(",", ".")
    elif commas:
        is_grouped = re.fullmatch(r"[1-9]\d{0,2}(?:,\d{3})+|[1-9]\d?(?:,\d\d)+,\d{3}", digits)
        if is_grouped and not (has_decimal_commas and commas == 1):
            digits = digits.replace(",", "")
        else:
            is_unsure = not has_decimal_commas
            digits = digits.replace(",", ".")
    elif dots > 1 or (has_decimal_commas and re.fullmatch(r"[1-9]\d{0,2}\.\d{3}", digits)):
        digits = digits.replace(".", "")
    number = Fraction(int(digits)) if digits.isdigit() else Fraction(digits)
    return number * Fraction(10) ** int(exponent) if exponent else number, is_unsure


def _written(number: Fraction) -> str:
    """Return a number with decimals as LaTeX, exactly."""
    if number.denominator == 1:
        return str(number.numerator)
    places = 0
    while (number * 10**places).denominator > 1 and places < 40:
        places += 1
    if places == 40:
        return f"\\frac{{{number.numerator}}}{{{number.denominator}}}"
    digits = str(abs(number.numerator) * 10**places // number.denominator).rjust(places + 1, "0")
    return f"{'-' * (number < 0)}{digits[:-places]}.{digits[-places:]}"


def _power(base: Value, exponent: Value) -> Fraction | None:
    """Return a small power of integers."""
    if base.number is None or exponent.number is None or base.is_unsure or base.is_percent:
        return None
    if exponent.number.denominator > 1 or abs(exponent.number) > 99 or not base.number:
        return None
    return base.number**exponent.number.numerator if abs(base.number) < 10**9 else None


def _product(left: Value, sign: str, right: Value) -> Value:
    """Return a product: a number only for 3/4 and 1.2*10^3, since 9*2 is no answer but a task."""
    number = None
    if left.number is not None and right.number is not None and not left.is_percent:
        if sign == "/" and right.number and left.is_literal and right.is_literal:
            number = left.number / right.number
        elif sign == "*" and left.is_literal and right.latex.startswith("10^"):
            number = left.number * right.number
    shown = {"*": "\\cdot ", "/": "/", "": " "}[sign]
    if sign == "/":
        latex = f"\\frac{{{left.latex}}}{{{right.latex}}}"
    else:
        latex = f"{left.latex}{shown}{right.latex}"
    is_unsure = left.is_unsure or right.is_unsure
    return Value(number, latex, is_percent=right.is_percent and number is not None, is_unsure=is_unsure)
