"""Answers are found and compared in the forms that models write.

`answer_forms.jsonl` has those for which the grammar was made; `unseen_forms.jsonl` has others, which
were written without the code at hand when the grammar stood.
"""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rolloutmq.extensions.answers import words as answer_words
from rolloutmq.extensions.answers.judges import gsm8k, math_verify
from rolloutmq.extensions.answers.truths import Truth, read_answer
from tests.thoroughness import examples

FORMS = [
    orjson.loads(line)
    for name in ("answer_forms.jsonl", "unseen_forms.jsonl")
    for line in Path(__file__).with_name(name).read_bytes().splitlines()
]
ALGEBRA = {"expression", "words"}
"""Kinds of forms that `gsm8k` does not score: their answers are no numbers."""


def score(judge: Any, text: str, truth: str) -> float:
    return float(judge(response=text, ground_truth=truth)["score"])


@pytest.mark.parametrize("judge", [gsm8k, math_verify])
def test_every_form_of_the_table_gets_its_score(judge: Any) -> None:
    forms = [form for form in FORMS if judge is math_verify or form["kind"] not in ALGEBRA]
    wrong = [
        (form["text"], form["truth"])
        for form in forms
        if score(judge, form["text"], form["truth"]) != form["score"]
    ]
    assert not wrong
    assert sum(form["score"] == 0 for form in forms) > len(forms) / 3


# -- any number, in any style and sentence ---------------------------------------------------------


def grouped(value: Fraction) -> str:
    text = f"{Decimal(value.numerator) / Decimal(value.denominator):,f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def latex_fraction(value: Fraction) -> str:
    sign = "-" if value < 0 else ""
    return rf"{sign}\dfrac{{{abs(value.numerator)}}}{{{value.denominator}}}"


def mixed(value: Fraction) -> str:
    whole, rest = divmod(abs(value.numerator), value.denominator)
    sign = "-" if value < 0 else ""
    return f"{sign}{whole} {rest}/{value.denominator}" if whole and rest else f"{value}"


def dollars(value: Fraction) -> str:
    return f"-${grouped(-value)}" if value < 0 else f"${grouped(value)}"


STYLES: dict[str, Callable[[Fraction], str]] = {
    "plain": grouped,
    "bold": lambda value: f"**{grouped(value)}**",
    "code": lambda value: f"`{grouped(value)}`",
    "minus sign": lambda value: grouped(value).replace("-", "\N{MINUS SIGN}"),
    "en dash": lambda value: grouped(value).replace("-", "\N{EN DASH}"),
    "dollars": dollars,
    "escaped dollars": lambda value: dollars(value).replace("$", r"\$"),
    "unit": lambda value: f"{grouped(value)} apples",
    "area": lambda value: f"{grouped(value)} cm^2",
    "thin spaces": lambda value: grouped(value).replace(",", "\N{THIN SPACE}"),
    "latex groups": lambda value: f"${grouped(value).replace(',', '{,}')}$",
    "parentheses": lambda value: rf"\({grouped(value)}\)",
    "fraction": lambda value: f"{value}",
    "latex fraction": lambda value: f"${latex_fraction(value)}$",
    "mixed": mixed,
    "boxed": lambda value: rf"$\boxed{{{grouped(value)}}}$",
    "boxed fraction": lambda value: rf"\boxed{{{latex_fraction(value)}}}",
    "boxed text": lambda value: rf"\boxed{{{grouped(value)} \text{{ apples}}}}",
}

SENTENCES = [
    "{}",
    "The answer is {}.",
    "So the answer is {}, because each of 3 boxes has some.",
    "**Answer:** {}",
    "**Final Answer**\n\n{}",
    "### Answer\n{}\n",
    "It costs $5 and $3 more.\n\nThe final answer is: {}",
    "{} is the answer.",
    "#### {}",
    "There are 7 boxes.\n#### {}\n",
    "<think>The answer is 12345.</think>\nThe answer is {}.",
    "<answer>{}</answer>",
    "Answer: {}\n\nI used 7 eggs for this.",
    "The answer is not 12345 but {}.",
    "The answer is {}. I hope it is correct.<|im_end|>",
    "First we get 12345.\n\nTherefore x = {}",
    "| Answer |\n|---|\n| {} |",
]

VALUES = st.one_of(
    st.integers(-9_999_999, 9_999_999).map(Fraction),
    st.builds(lambda n, places: Fraction(n, 10**places), st.integers(-10**6, 10**6), st.integers(1, 3)),
    st.builds(Fraction, st.integers(-99, 99), st.sampled_from([2, 4, 5, 8])),
)  # fmt: skip


def solution(value: Fraction) -> str:
    return f"2 + 2 = 4\n#### {value}"


TRUTHS = st.sampled_from([grouped, str, latex_fraction, solution])


@settings(max_examples=examples(150), deadline=None)
@given(VALUES, VALUES, st.sampled_from(sorted(STYLES)), st.sampled_from(SENTENCES), TRUTHS)
def test_a_number_is_right_in_any_style_and_no_other_number_is(
    value: Fraction, other: Fraction, style: str, sentence: str, truth: Callable[[Fraction], str]
) -> None:
    assume(value != other and 12345 not in (value, other))
    text = sentence.format(STYLES[style](value))
    for judge in (gsm8k, math_verify):
        assert score(judge, text, truth(value)) == 1.0
        assert score(judge, text, truth(other)) == 0.0


OPEN = [
    "The answer is {} or {}.",
    "The answer is between {} and {}.",
    "#### {} or {}",
    "#### {}, {}",
    r"\boxed{{{}}} or \boxed{{{}}}",
    r"\boxed{{{} \text{{ or }} {}}}",
    "The answer is either {} or {}.",
    "{} or {}",
    "The answer is not {} or {}.",
]


@settings(max_examples=examples(50), deadline=None)
@given(st.integers(0, 10**7), st.integers(0, 10**7), st.sampled_from(OPEN))
def test_two_numbers_are_no_answer(one: int, other: int, sentence: str) -> None:
    assume(one != other)
    text = sentence.format(f"{one:,}", f"{other:,}")
    for truth in (one, other):
        for judge in (gsm8k, math_verify):
            assert score(judge, text, str(truth)) == 0.0


# -- what stands beside an answer ------------------------------------------------------------------

ANSWERS = [
    "The answer is {left}{value}{right}.",
    "#### {left}{value}{right}",
    "{left}{value}{right}",
    r"\boxed{{{left}{value}{right}}}",
    r"{left}\boxed{{{value}}}{right}",
    r"The answer is ${left}\boxed{{{value}}}{right}$.",
    "<answer>{left}{value}{right}</answer>",
    "{left}<answer>{value}</answer>{right}",
    "She has {left}**{value}**{right}.",
    "It is {left}`{value}`{right}.",
]
LEFT = [
    *("-", "half of ", "at least ", "twice ", "not ", "more than ", "anything but ", "up to "),
    *("2 ", "2 * ", "3 - ", "1/", "0.", "7", "2^", ">= ", "between 1 and ", "a multiple of "),
    *("without ", "1, ", "one or "),
]
RIGHT = [
    *(" million", " dozen", " or so, or 5", "/7", " - 1", " + 1", "^2", "!", "x", " less than 3"),
    *(" more than 3", " of 60", " to 90", ", 5", ".5", "0", " times 2", " squared", " is wrong"),
    *("?", " percent of 5", ":30", "_5"),
]
KNOWN = {*answer_words.KINDS, *answer_words.SCALES, *answer_words.PARTS, *answer_words.VALUES}
KNOWN |= {*answer_words.FUNCTIONS, *answer_words.CONSTANTS}
NAMES = st.text("abcdefghijklmnopqrstuvwxyz", min_size=3, max_size=9).filter(
    lambda word: word not in KNOWN and not word.endswith(("s", "ed"))
)


@settings(max_examples=examples(300), deadline=None)
@given(
    st.integers(3, 10**5),
    st.sampled_from(ANSWERS),
    st.sampled_from(LEFT),
    st.sampled_from(RIGHT),
    st.booleans(),
)
def test_what_makes_another_amount_of_a_number_is_never_right(
    value: int, answer: str, left: str, right: str, is_left: bool
) -> None:
    text = answer.format(value=value, left=left if is_left else "", right="" if is_left else right)
    assume("!" not in text or "!}" in text or "!$" in text)  # or it is an exclamation
    for judge in (gsm8k, math_verify):
        assert score(judge, text, str(value)) == 0.0


@settings(max_examples=examples(100), deadline=None)
@given(st.integers(2, 10**5), st.sampled_from(ANSWERS), NAMES)
def test_a_name_may_stand_behind_a_number_as_its_unit_but_never_before_it(
    value: int, answer: str, name: str
) -> None:
    before = answer.format(value=value, left=f"{name} ", right="")
    behind = answer.format(value=value, left="", right=f" {name}")
    for judge in (gsm8k, math_verify):
        assert judge(response=before, ground_truth=str(value)) == {"score": 0.0, "unparsed": 1.0}
        assert judge(response=behind, ground_truth=str(value)) == {"score": 1.0, "unparsed": 0.0}


# -- hostile texts ---------------------------------------------------------------------------------

UNITS = [
    *("answer ", "the answer is not ", "\\boxed{", "{", "}", "\\boxed{1} or ", "####", "#### 1\n"),
    *("$", "$1", "*", "**1", "`", "1", "1 ", "1,", "1,000 ", "1/", "-", "1+1=", "\\frac{1}{"),
    *("\\text{", "not 1 ", "1 or ", "a. ", "\n", "| ", "<think>", "</think>", "<a", "~~1", "\\"),
    *("1(", "[1,", "|1", "sin ", "one and ", "\\sqrt[", "°", "\\{", "\\(", "((", ")", "1^", "1e9"),
    *("½", "√2", "1_000", "because ", "wait ", "answer (", "\\left", "the = ", "x = 1 ", "not = "),
]


@pytest.mark.parametrize("unit", UNITS)
def test_a_long_hostile_text_is_read_in_linear_time(unit: str) -> None:
    """Quadratic time would take minutes for one of these texts."""
    text = unit * (100_000 // len(unit))
    for response in (text, f"The answer is 18. {text}", f"{text} The answer is 18."):
        read_answer(response)
        Truth.of("Monday").compare(response)


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.one_of(st.sampled_from(UNITS), st.text(max_size=3)), max_size=40).map("".join))
def test_any_text_is_read_without_an_exception(text: str) -> None:
    read_answer(text)
    Truth.of("Monday").compare(text)
    Truth.of(text)


# -- what was not found ----------------------------------------------------------------------------


@pytest.mark.parametrize("judge", [gsm8k, math_verify])
@pytest.mark.parametrize(
    ("text", "unparsed"),
    [
        *(("", 1.0), ("no idea", 1.0), ("17 or 18", 1.0), ("\\boxed{18", 1.0)),
        *(("19", 0.0), ("18", 0.0), ("\\boxed{18}", 0.0)),
    ],
)
def test_a_response_without_an_answer_is_counted(judge: Any, text: str, unparsed: float) -> None:
    assert judge(response=text, ground_truth="18")["unparsed"] == unparsed
