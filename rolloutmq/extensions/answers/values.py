# ruff: noqa: RUF001 (signs that look alike are what this file is about)
r"""Read values as models write them: numbers in any style, and mathematics, as exact LaTeX.

    value   = operand {operator operand}
    operand = number [scale] | letter | function operand | (value {, value}), with ! ° % behind

All of this takes time in proportion to the text; `answers` cuts it at 1,000 characters.
"""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction
from typing import NamedTuple

from rolloutmq.extensions.answers.words import CONSTANTS, FUNCTIONS, SCALES, UNIT_LETTERS, UNITS

# -- plain text ------------------------------------------------------------------------------------

_SIGNS = """
- ‐ ‑ ‒ – − ﹣ － | --- — ― | * × · ⋅ ∙ ✕ ✖ ∗ | / ÷ ∕ ⁄ | = ≈ ≃ ≅ ∼ ⇒ → ⟹ ⟶ ➡ ➜ ⇔ | so ∴ | ' ‘ ’ ʼ
\\le ≤ ⩽ | \\ge ≥ ⩾ | \\ne ≠ | \\in ∈ | \\infty ∞ | \\sqrt √ | \\cup ∪ | \\cap ∩ | \\emptyset ∅
\\mathbb{R} ℝ | \\mathbb{Z} ℤ | \\mathbb{N} ℕ | \\mathbb{Q} ℚ | \\mathbb{C} ℂ | ° º ˚ ℃ ℉ | µ μ
. ٫ 。 ． | , ٬ ، 、 ， | ; ؛ | \\pi π | \\Omega Ω Ω | \\alpha α | \\beta β | \\gamma γ | \\delta δ
\\theta θ | \\lambda λ | \\sigma σ | \\phi φ | \\omega ω
"""


class _Characters(dict[int, str]):
    """Gives each character as ASCII where it only looks different: other digits, wide letters."""

    def __missing__(self, code: int) -> str:
        found = char = chr(code)
        kind = unicodedata.category(char)
        if char.isdecimal():
            found = str(unicodedata.decimal(char))
        elif kind in ("Cf", "Mn"):
            found = ""
        elif kind in ("Zs", "Sc", "Pi", "Pf", "So", "Sk") and code > 127 and char != "°":
            found = " "  # spaces, currency, quotes, ornaments
        elif unicodedata.decomposition(char).startswith(("<fraction>", "<wide>", "<font>")):
            found = unicodedata.normalize("NFKC", char).replace("\u2044", "/")
            found = f" {found}" if kind == "No" else found
        self[code] = found
        return found


_CHARACTERS = _Characters()
for _row in _SIGNS.replace("\n", "|").split("|"):
    if _row.strip():
        _new, *_alike = _row.split()
        _spaced = (
            f"{_new} " if _new[0] == "\\" else f" {_new} " if _new in ("---", "so", "=") else _new
        )
        _CHARACTERS |= {ord(each): _spaced for each in _alike}

_RAISED, _LOWERED = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ]+"), re.compile("[₀-₉]+")
_LEVEL = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ₀₁₂₃₄₅₆₇₈₉", "0123456789-+n0123456789")
_WRAPPERS = (
    "text|textbf|textit|textrm|textnormal|texttt|textsf|emph|underline|mathrm|mathbf|mathit|mathsf|"
    "mbox|hbox|boldsymbol|bm|operatorname|boxed|fbox|num"
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
    (
        rf"(?<=[\d{BOX_END}])!(?=\s?(?:\$|\\[)\]]|\}}))",
        FACTORIAL,
    ),  # in a formula, and no exclamation
    (r"(?<=[\w)])\*\*(?=-?\d)", "^"),
    ("`", ""),
    (r"\*{2,3}|__(?!\w)|(?<!\w)__|\"", " "),
    (r"(?<![\w*)])\*(?=[^\s*])([^*\n]{1,80})(?<=\S)\*(?![\w*])", r" \1 "),
    (r"(?<![a-zA-Z0-9\\}])_|(?<=\d)_(?=\d{3})|_(?![\w{\\])", ""),
    (r"(?<=[-+±])\s?\\?\$(?=[\d.])", ""),  # -$5
    (r"[-=]>", " = "),
    (r"\{,\}", ","),
    (r"(?<=\d)/-(?!\d)", " "),  # rupees
    (r"(?i)\b(?:negative|minus)\s+(?=[\d.])", "-"),
)
_LATEX = _compiled(
    (r"\\\\", _ROW_END),
    (r"\\(?:left|right|middle|[bB]igg?[lrm]?)\s*(?:\.|(?![a-zA-Z]))", ""),
    (r"\\(?:displaystyle|textstyle|large|Large|small|limits)(?![a-zA-Z])", " "),
    (r"\\!", ""),
    (r"\\[,;:> ()\[\]]|\\q?quad(?![a-zA-Z])|~", " "),
    (r"(?:\^\s*\{?\s*)?\\(?:circ|degree|degrees)(?![a-zA-Z])\s*\}?", "°"),
    (r"\\(?:SI|qty)\s*\{([^{}]*)\}\s*\{([^{}]*)\}", r" \1 \2 "),
    (r"(?<=\d)(\s*[kMG]?)\s?\\Omega(?![a-zA-Z])", r" \1ohm"),
    (r"\\mu(?=\s*(?:\\(?:text|mathrm)\{)?\s*[mgsFLAV]\b)", "µ"),
    (rf"\\(?:{_WRAPPERS})\*?\s*\{{([^{{}}]*)\}}", r" \1 "),
    (rf"\\(?:{_WRAPPERS})\*?\s*\{{([^{{}}]*)\}}", r" \1 "),  # one in another
    (r"\\boxed(?![a-zA-Z])", " "),
    (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
    (r"\\frac\s*(\d)\s*([\d{])", r"\\frac{\1}\2"),
    (r"(\\frac\s*\{[^{}]*\}|\\sqrt)\s*(\d)", r"\1{\2}"),
    (r"\\([%_#&*])", r"\1"),
    (r"\\(?:times|cdot|ast)(?![a-zA-Z])", "*"),
    (r"\\div(?![a-zA-Z])", "/"),
    (r"\\(?:approx|simeq|implies|Rightarrow|rightarrow|iff|to|sim)(?![a-zA-Z])", " = "),
    (r"\\pm(?![a-zA-Z])", "±"),
    (r"\\[lc]?dots(?![a-zA-Z])", "…"),
    (r"\\therefore(?![a-zA-Z])", " so "),
    (r"\\\$", " "),
)


def plain(text: str) -> str:
    """Return `text` without Markdown, currency signs and the LaTeX that only sets type."""
    if not text.isascii():
        text = _RAISED.sub(lambda found: f"^{{{found[0].translate(_LEVEL)}}}", text)
        text = _LOWERED.sub(lambda found: f"_{{{found[0].translate(_LEVEL)}}}", text)
        text = text.translate(_CHARACTERS)
    for pattern, new in _MARKDOWN if "\\" not in text else (*_MARKDOWN, *_LATEX):
        text = pattern.sub(new, text)
    return text.replace("$", " ")


# -- tokens ----------------------------------------------------------------------------------------

_TOKEN = re.compile(
    rf"""
    (?P<matrix>\\begin\{{[a-z]{{0,9}}(?:matrix|array)\}}.{{1,600}}?\\end\{{[a-z]{{0,12}}\}})
    | (?P<name>                                        # times, versions, dates, a1, COVID-19
        \d+(?::\d+)+(?![\w:])
        | (?!\d{{1,3}}(?:\.\d{{3}})+(?![\d.]))\d+(?:\.\d+){{2,}}(?!\w)
        | \d{{4}}-\d\d?-\d\d?(?!\d) | \d\d?/\d\d?/\d{{2,4}}(?!\d)
        | [^\W\d_]+\d\w*(?:[-.]\w+)* | [^\W\d_]{{2,}}-\d[\w.-]*(?<!\.))
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


END = Token("end", "", 0, 0, True)


def tokens_of(text: str) -> list[Token]:
    """Return the tokens of a plain text, and `END`."""
    found: list[Token] = []
    end = 0
    for match in _TOKEN.finditer(text):
        has_gap = bool(text[end : match.start()].strip(BOX_START + BOX_END))
        found.append(Token(match.lastgroup or "", match[0], match.start(), match.end(), has_gap))
        end = match.end()
    return [*found, END]


# -- values ----------------------------------------------------------------------------------------


class Value(NamedTuple):
    """A number, or None for an expression, and its LaTeX. `is_unsure`: 3,14 may be a list."""

    number: Fraction | None
    latex: str
    is_percent: bool = False
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


_DEEPEST = 12  # brackets in brackets
_SIGN = {"±": "\\pm", "*": "\\cdot", "<=": "\\le", ">=": "\\ge", "!=": "\\ne"}
_NAMED = "le leq ge geq lt gt ne neq in subset subseteq cup cap setminus mp"
_OPERATORS = frozenset(("+", "-", "/", "^", "_", "<", ">", *_SIGN)) | {
    f"\\{name}" for name in re.findall(r"\w+", _NAMED)
}
_CLOSING = {"(": ")]", "[": ")]", "{": "}", "\\{": "\\}", "|": "|"}
_CLOSING |= {"\\lfloor": "\\rfloor", "\\lceil": "\\rceil", "\\langle": "\\rangle"}
_WITH_ARGUMENTS = frozenset(("frac", "binom", "overline", "vec", "mathbb"))
_PERCENTS = frozenset(("%", "٪", "percent", "pct", "prozent"))


def value_at(tokens: list[Token], at: int, *, has_decimal_commas: bool) -> tuple[Value, int] | None:
    """Return the longest value that begins at a token, and the place behind it."""
    end = _Scan(tokens, at).end()
    if end == at:
        return None
    return _value(tokens[at:end], has_decimal_commas=has_decimal_commas), end


class _Scan:
    """Reads one value: operands and operators take turns, and brackets close.

    Two operands without a sign are a product (2x, 3 sqrt(2)), but 18 m is a number with its unit,
    and 18 (9 eggs) one with a remark.
    """

    def __init__(self, tokens: list[Token], at: int) -> None:
        self.tokens = tokens
        self.place = at
        self.before = END
        self.brackets: list[int] = []  # where they open
        self.is_open = True  # an operand must follow
        self.script = (
            -1
        )  # brackets around the script of a function, whose argument follows: log_2 3

    def end(self) -> int:
        good = self.place
        while (token := self.tokens[self.place]) is not END:
            if not (
                self._closes(token) or (self._operand if self.is_open else self._behind)(token)
            ):
                break
            self.place, self.before = self.place + 1, token
            if not self.is_open and not self.brackets:
                good = self.place
        return good

    def _closes(self, token: Token) -> bool:
        if not self.brackets or (self.is_open and self.before.text != "\\{"):
            return False
        opening = self.brackets[-1]
        if token.text not in _CLOSING[self.tokens[opening].text]:
            return False
        self.brackets.pop()
        is_root = self.tokens[opening].text == "[" and self.tokens[opening - 1].text == "\\sqrt"
        self._has_operand(token, goes_on=is_root and opening > 0)
        return True

    def _has_operand(self, token: Token, *, goes_on: bool = False) -> None:
        self.is_open = goes_on or _is_function(token) or self.script == len(self.brackets)
        if self.script == len(self.brackets):
            self.script = -1

    def _opens_bracket(self, token: Token) -> bool:
        if len(self.brackets) == _DEEPEST or (token.text == "|" and self._after().has_gap):
            return False
        self.brackets.append(self.place)
        self.is_open = True
        return True

    def _after(self) -> Token:
        return self.tokens[self.place + 1]

    def _operand(self, token: Token) -> bool:
        """Take a token where an operand must follow."""
        if token.text in _CLOSING:
            return self._opens_bracket(token)
        if token.text in ("^", "_") and _is_function(self.before):
            self.script = len(self.brackets)
            return True
        if self._is_operand(token):
            self._has_operand(token)
            return True
        return token.text in ("-", "+", "±", "\\mp") and not _is_function(self.before)

    def _is_operand(self, token: Token) -> bool:
        if token.kind in ("number", "matrix") or _is_function(token):
            return True
        if token.text.removeprefix("\\") in CONSTANTS or token.kind != "word":
            return token.text.removeprefix("\\") in CONSTANTS
        is_raised = self._after().text in ("^", "_") and not self._after().has_gap
        return len(token.text) == 1 or (len(token.text) <= 3 and is_raised and token.text.isascii())

    def _behind(self, token: Token) -> bool:
        """Take a token behind an operand."""
        is_number = self.before.kind == "number"
        if token.text == "x" and is_number and self._after().kind == "number":
            self.is_open = True
        elif token.text in _OPERATORS or (self.brackets and token.text in ",;"):
            self.is_open = not (token.text == "_" and is_number)  # 42_8
            return self.is_open
        elif token.kind == "word" and token.text.lower() in SCALES:
            return is_number and not (token.has_gap and len(token.text) == 1)
        elif token.text == "!":
            return not token.has_gap and not is_number
        elif token.text not in ("°", FACTORIAL) and token.text.lower() not in _PERCENTS:
            return self._factor(token)
        return True

    def _factor(self, token: Token) -> bool:
        """Take an operand behind another one, as its factor."""
        is_number = self.before.kind == "number"
        if token.text in _CLOSING:
            is_argument = token.text == "{" and self.before.text == "}"
            is_group = token.text == "(" and not (token.has_gap and is_number)
            is_factor = is_argument or is_group or token.text[:2] == "\\l"
            return is_factor and self._opens_bracket(token)
        if token.kind == "number":
            is_mixed = (
                self.before.text.isdigit() and token.text.isdigit() and self._after().text == "/"
            )
            return is_mixed if is_number else not token.has_gap
        if token.kind != "word" or token.text in CONSTANTS or _is_function(token):
            is_factor = self._is_operand(token)
            self.is_open = _is_function(token)
            return is_factor
        if token.text in UNIT_LETTERS and (is_number or self.before.text in "}°"):
            exponent = self.tokens[self.place + 2].text if self._after().text == "^" else "2"
            return exponent not in ("2", "3", "{") or self._after().text in ("+", "*", "(")
        if len(token.text) == 1:
            return not token.has_gap or token.text not in "aAI"
        is_short = not token.has_gap and len(token.text) <= 3 and token.text.isascii()
        return is_short and token.text.lower() not in UNITS


def _is_function(token: Token) -> bool:
    name = token.text.removeprefix("\\")
    return name in FUNCTIONS or (name in _WITH_ARGUMENTS and token.kind == "command")


# -- numbers ---------------------------------------------------------------------------------------

_BRACKETED = re.compile(r"([-+]?)[({\[](.*)[)}\]]")
_NUMBER = re.compile(  # 0 stands for any number without a sign
    r"[-+]?(?:0|0/0|0 0/0|\\frac\{[-+]?0\}\{[-+]?0\}|0\\frac\{0\}\{0\}|(?P<times>0\*)?0\^\{?-?0\}?)"
)


def _value(tokens: list[Token], *, has_decimal_commas: bool) -> Value:
    """Return the value of tokens: a number where they are one number, else an expression."""
    numbers: list[Fraction] = []
    shape = ""
    is_unsure = is_percent = False
    for token in tokens:
        if token.kind == "number":
            number, may_be_list = _parsed(token.text, has_decimal_commas)
            numbers.append(number)
            is_unsure |= may_be_list
            shape += " 0" if shape[-1:] == "0" else "0"
        elif token.text.lower() in SCALES and numbers:
            numbers[-1] *= SCALES[token.text.lower()]
        elif token.text.lower() in _PERCENTS:
            is_percent = True
        elif token.text != "°":
            shape += token.text
    latex = _latex(tokens, numbers, has_decimal_commas)
    sign = 1
    while bracketed := _BRACKETED.fullmatch(shape):
        sign, shape = -sign if bracketed[1] == "-" else sign, bracketed[2]
        if is_unsure:
            return Value(None, latex)
    value = _evaluated(shape, numbers)
    return Value(None if value is None else sign * value, latex, is_percent, is_unsure)


def _evaluated(shape: str, numbers: list[Fraction]) -> Fraction | None:
    """Return the value of a number in its shape; None for 9*2, which is no answer but a task."""
    match = _NUMBER.fullmatch(shape)
    if match is None:
        return None
    first, last, is_negative = numbers[0], numbers[-1], shape.count("-") % 2 == 1
    if "^" in shape:
        base = numbers[-2]
        if (
            last.denominator > 1
            or last > 99
            or base > 10**9
            or not base
            or (match["times"] and base != 10)
        ):
            return None
        power = base ** (-last.numerator if "^-" in shape or "^{-" in shape else last.numerator)
        value = power * first if match["times"] else power
        return -value if shape[0] == "-" else value
    if len(numbers) == 1:
        value = first
    elif not last:
        return None
    elif len(numbers) == 2:
        value = first / last
    elif first.denominator > 1 or not 0 < numbers[1] < last:
        return None
    else:
        value = first + numbers[1] / last
    return -value if is_negative else value


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


# -- LaTeX -----------------------------------------------------------------------------------------


def _latex(tokens: list[Token], numbers: list[Fraction], has_decimal_commas: bool) -> str:
    r"""Return tokens as LaTeX: sqrt(2) as \sqrt{2}, x^(10) as x^{10}, {1,2} as a set."""
    found: list[str] = []
    closing: list[str] = []  # of the brackets that are open
    values = iter(numbers)
    for at, token in enumerate(tokens):
        before = tokens[at - 1].text if at else ""
        if token.kind == "number":
            is_list = "," in token.text and (closing or _parsed(token.text, has_decimal_commas)[1])
            number = _written(next(values))
            text = token.text if is_list else number
        elif token.text in _CLOSING and (token.text != "|" or "|" not in closing):
            text = _opening(tokens, at)
            closing.append({"{": "}", "\\{": "\\}"}.get(text, _CLOSING[token.text]))
        elif closing and token.text in (*")]}|", "\\}", "\\rfloor", "\\rceil", "\\rangle"):
            text = token.text if closing[-1] == ")]" else closing[-1]
            closing.pop()
        else:
            beside = [each.kind for each in (*tokens[:at][-1:], *tokens[at + 1 :][:1])]
            is_times = token.text == "x" and beside == ["number", "number"]
            text = "\\cdot" if is_times else _written_sign(token)
        is_script = before in ("^", "_") and text not in ("{", "-")
        found.append(f"{{{text}}}" if is_script else text)
    return " ".join(filter(None, found))


def _opening(tokens: list[Token], at: int) -> str:
    token, before = tokens[at], tokens[at - 1].text if at else ""
    if token.text == "(" and (before == "^" or before.removeprefix("\\") == "sqrt"):
        return "{"
    if token.text == "{" and not (before[:1] == "\\" or before in ("^", "_", "}")):
        end = next((n for n in range(at, len(tokens)) if tokens[n].text == "}"), at)
        return "\\{" if any(each.text in ",;" for each in tokens[at:end]) else "{"
    return token.text


def _written_sign(token: Token) -> str:
    name = token.text.removeprefix("\\")
    if token.kind == "matrix":
        return token.text.replace(_ROW_END, "\\\\")
    if name in FUNCTIONS or name in CONSTANTS:
        return FUNCTIONS.get(name) or CONSTANTS[name]
    if token.text.lower() in _PERCENTS:
        return "\\%"
    if token.kind == "word" and len(token.text) > 1:
        return "" if token.text.lower() in SCALES else GUESS + " ".join(token.text)
    return {"°": "^\\circ", FACTORIAL: "!"}.get(token.text) or _SIGN.get(token.text, token.text)


def _written(number: Fraction) -> str:
    """Return a number with decimals as LaTeX, exactly."""
    if number.denominator == 1:
        return str(number.numerator)
    places = max(len(str(number.denominator)) * 4, 1)
    digits = str(number * 10**places) if (number * 10**places).denominator == 1 else ""
    if not digits:
        return f"\\frac{{{number.numerator}}}{{{number.denominator}}}"
    digits = digits.rjust(places + 1, "0")
    return f"{digits[:-places]}.{digits[-places:].rstrip('0')}"
