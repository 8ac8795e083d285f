"""Make a text plain: without Markdown, and with ASCII in place of LaTeX and typography."""

from __future__ import annotations

import re

_CHARACTERS = str.maketrans(
    dict.fromkeys("\u2212\u2010\u2011\u2013\ufe63\uff0d", "-")
    | dict.fromkeys("\u00a0\u2007\u2009\u202f\u2002\u2003\u3000", " ")
    | dict.fromkeys("\u00d7·⋅∙✕", "*")
    | {chr(0xFF01 + n): chr(0x21 + n) for n in range(94) if n != 12}  # full width
    | dict.fromkeys("≈≃⇒→", "=")
    | {"÷": "/", "\u2044": "/", "√": "\\sqrt ", "π": "\\pi "}
    | {"½": " 1/2", "⅓": " 1/3", "⅔": " 2/3", "¼": " 1/4", "¾": " 3/4", "⅛": " 1/8", "⅕": " 1/5"}
    | dict.fromkeys("\u201c\u201d\u201e«»\"'\u2019", " ")
    | dict.fromkeys("\u200b\u200e\ufeff", "")
)  # fmt: skip
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
_WRAPPERS = (
    "text|textbf|textit|textrm|textnormal|texttt|emph|underline|mathrm|mathbf|mathit|mathsf|mbox|"
    "boldsymbol|bm|operatorname|boxed|fbox|displaystyle"
)
_PART = r"\s*(?:\{\s*(-?[\d.,]+)\s*\}|(\d))"
_RULES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), new)
    for pattern, new in (
        (r"~~[^~\n]{1,200}~~", " "),  # struck out
        (r"<<[^<>\n]{0,80}>>", ""),  # what a calculator was asked
        (r"</?[a-zA-Z][^<>\n]{0,40}>|&nbsp;", " "),
        (r"\\(?:left|right|[bB]igg?[lr]?|displaystyle|q?quad)(?![a-zA-Z])", " "),
        (r"\\!|(?<=\d)_(?=\d{3})", ""),
        (r"\\[,;:> ()\[\]]|~", " "),
        (r"\{,\}", ","),
        (r"(?:\^\s*\{?\s*)?\\(?:circ|degree)(?![a-zA-Z])\s*\}?", "°"),
        (rf"\\[dtc]?frac{_PART}{_PART}", r" \1\2/\3\4 "),
        (rf"\\(?:{_WRAPPERS})\s*\{{([^{{}}]*)\}}", r" \1 "),
        (rf"\\(?:{_WRAPPERS})\s*\{{([^{{}}]*)\}}", r" \1 "),  # one in another
        (r"\\boxed(?![a-zA-Z])", " "),
        (r"(?<=\d)!(?=\s?(?:\$|\\[)\]]|\}))", "!¡"),  # a factorial
        (r"\\%", "%"),
        (r"\\(?:times|cdot)(?![a-zA-Z])", "*"),
        (r"\\div(?![a-zA-Z])", "/"),
        (r"\\(?:approx|simeq|implies|Rightarrow|rightarrow|to)(?![a-zA-Z])|[-=]>", "="),
        (r"\\(?:leq?|geq?|lt|gt|neq?|leqslant|geqslant)(?![a-zA-Z])", "<"),
        (r"\\pm(?![a-zA-Z])", "±"),
        (r"(?<=[-+±])\s?\\?[$€£¥₹₩](?=[\d.])", ""),
        (r"\\?[$€£¥₹₩]", " "),
        (r"\b(?:US|USD|EUR|GBP|INR|CAD|AUD|Rs\.?)\s?(?=[\d.-])", " "),
        (r"(?<=\d)\*\*(?=\d)", "^"),
        (r"\*\*|__|`", " "),
        (r"(?<![\w*)])\*(?=[^\s*])([^*\n]{1,80})(?<=\S)\*(?![\w*])", r" \1 "),
        (r"(?<![a-zA-Z0-9\\])_|_(?![\w{\\])", " "),
        (r"(?<![\\\w^_}])\{\s*(-?[\d.,/ ]+)\}", r" \1 "),
        (r"-\s{0,3}\(\s{0,3}(\d[\d.,/]*)\s{0,3}\)", r"-\1"),
        (r"(?i)\b(?:negative|minus)\s+(?=[\d.])", "-"),
    )
)


def powers(text: str) -> str:
    """Return `text` with ^{2} in place of superscripts."""
    return re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+", lambda found: f"^{{{found[0].translate(_SUPERSCRIPTS)}}}", text)


def plain(text: str) -> str:
    """Return `text` without Markdown, currency signs and the LaTeX that only sets type."""
    text = powers(text).translate(_CHARACTERS)
    for pattern, new in _RULES:
        text = pattern.sub(new, text)
    return text
