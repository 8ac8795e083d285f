r"""Find where a response gives its answer.

From the end: \boxed{…}, "#### …", sentences or headings with the word "answer", else the last
sentences; nothing before </think>. All patterns take time in proportion to the text.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

# Decoding leaves these in the text where a tokenizer does not mark its end of turn as special.
END_MARKERS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<end_of_turn>", "</s>")

_MOST = 20  # marks, and sentences, that are looked at from the end

_LONGEST = 1000  # characters of the longest answer

_ASCII = {0x2018: "'", 0x2019: "'", 0x201C: '"', 0x201D: '"', 0x2212: "-", 0xFF1A: ":"}

_CUT_OFF = "…"

_TAIL = 2000  # characters searched at the end of a response without a mark


class AnswerSpan(NamedTuple):
    """A part of a response that may be its answer; `is_marked`: the response says that it is."""

    text: str
    is_marked: bool
    start: int = 0
    end: int = 0


def answer_text(response: str) -> str:
    """Return `response` without surrounding white space and trailing end markers."""
    text = response.strip()
    while text.endswith(END_MARKERS):
        marker = next(marker for marker in END_MARKERS if text.endswith(marker))
        text = text.removesuffix(marker).rstrip()
    return text


def spans(response: str) -> Iterator[AnswerSpan]:
    """Yield possible answers of a response, the most probable first."""
    text = answer_text(response).translate(_ASCII)
    _, thought_end, said = text.rpartition("</think>")
    if thought_end:
        text = said
    elif "<think>" in text:
        return
    marked = sorted(
        (*_boxes(text), *_hashes(text), *_sentences_with_answer(text)),
        key=lambda span: span.start,
        reverse=True,
    )[:_MOST]
    if marked and marked[0].text == _CUT_OFF:
        return
    behind = text[max(marked[0].end, len(text) - _TAIL) :] if marked else ""
    if taken_back := _TAKEN_BACK.search(behind):
        yield from _last_sentences(behind[taken_back.end() :])
        if taken_back["wrong"]:
            return
    yield from marked
    yield from _last_sentences(text[-_TAIL:])


# -- marks -----------------------------------------------------------------------------------------

_BRACES = re.compile(r"\\(?:boxed|fbox)\s*(?P<box>\{)|\\[\\{}]|[{}]")
_BOXED_TOKEN = re.compile(r"\\boxed\s*(-?[\d.,]+)")
_JOINED = re.compile(r"[\s$.]*(?:,|;|or|and|\\text\{ ?(?:or|and) ?\}|\\quad)*[\s$]*(?:\w\s*=\s*)?")
_DENIED = re.compile(r"(?i)(?:\bnot|n't|\bnever)\s+(?:be\s+)?[$*(\s]*$")
_DENIAL = re.compile(
    r"(?i)[\s$*.,)]{0,6}(?:(?:is|was)\s*(?:not\b|n't|wrong|incorrect|false)|cannot be|can't be)"
)
_GOES_ON = re.compile(
    r"[\s$]*(?:or\s+[-$]*\d[\d.,]*|(?:\\times|\\cdot|[*/^])\s?[-\d({][^\s$]{0,20})", re.IGNORECASE
)
_TAKEN_BACK = re.compile(
    r"(?i)\b(?:(?P<wrong>"
    r"(?:that|this|it)(?:'s| is| was) (?:wrong|incorrect|not (?:right|correct|true))|"
    r"i made (?:a|an) (?:mistake|error)|scratch that|oops|correction\b|on second thought|i meant)|"
    r"(?<![a-zA-Z,] )(?:no,|(?:no,? )?(?:wait|actually|hold on)\b)|hmm+\b|"
    r"it should(?: actually| rather)? be)"
)


def _boxes(text: str) -> Iterator[AnswerSpan]:
    r"""Yield the last boxes; "\boxed{1} and \boxed{2}" is one answer."""
    found: list[AnswerSpan] = []
    for box in _braced(text):
        before = text[max(0, box.start - 40) : box.start]
        if not box.text.strip() or _DENIED.search(before) or _DENIAL.match(text, box.end):
            continue
        if box.text.rstrip().endswith("!"):  # a factorial, and no exclamation
            box = box._replace(text=f"${box.text}$")
        if goes_on := _GOES_ON.match(text, box.end):  # \boxed{17} or 18
            box = box._replace(text=box.text + goes_on[0])
        between = text[found[-1].end : box.start] if found else ""
        if between.strip(" $.\n") and len(between) < 40 and _JOINED.fullmatch(between):
            last = found.pop()
            box = AnswerSpan(f"{last.text}, {box.text}", True, last.start, box.end)
        found.append(box)
    yield from found
    for token in deque(_BOXED_TOKEN.finditer(text), _MOST):
        yield AnswerSpan(token[1], True, *token.span())


def _braced(text: str) -> Iterator[AnswerSpan]:
    """Yield the last outermost boxes in their order, and an empty one for a box that is cut off."""
    if "\\boxed" not in text and "\\fbox" not in text:
        return
    found: deque[tuple[int, int, int]] = deque(maxlen=_MOST)
    depth, start, opened = 0, -1, 0
    for brace in _BRACES.finditer(text):
        if brace["box"] and start < 0:
            start, opened, depth = brace.start(), brace.end(), 1
        elif start >= 0 and (brace["box"] or brace[0] == "{"):
            depth += 1
        elif start >= 0 and brace[0] == "}":
            depth -= 1
            if not depth:
                found.append((start, opened, brace.end()))
                start = -1
    for start_of, opened_at, end in found:
        yield AnswerSpan(text[opened_at : end - 1][:_LONGEST], True, start_of, end)
    if start >= 0:
        yield AnswerSpan(_CUT_OFF, True, start, len(text))


def _hashes(text: str) -> Iterator[AnswerSpan]:
    for mark in deque(re.finditer(r"####+(?!#)", text), _MOST):
        line = text[mark.end() : mark.end() + _LONGEST].partition("\n")[0]
        line = line.partition("####")[0].strip().rstrip("#").strip()
        follows = text[mark.end() : mark.end() + _LONGEST].partition("\n")[2].strip("`*_ \n")
        # "#### Step 1", "#### 2. Add", with text below: a heading
        is_heading = follows and re.match(
            r"\d{1,2}[.)]\s+[A-Za-z*]|[A-Za-z]{2}", line.lstrip("*_ ")
        )
        if line and not is_heading:
            yield AnswerSpan(line, True, mark.start(), mark.end() + len(line))


_WORD = re.compile(
    r"(?i)(?<![/\w\\-])(?:answers?|ans|antwort|réponse|respuesta|risposta|resposta|ответ)(?![\w-])"
    r"|答案|答え"
)
_UNSURE = re.compile(
    r"(?i)\b(?:(?:not|never|doubt|if|whether|suppose|assum\w+|wrong|incorrect|false|previous|"
    r"earlier|initial|old|tempting|possible|might|may|could)|\w+n't)\b[^.,:;!?\n]*$"
    r"|\b(?:to|can|cannot|could|will|must|we|i|you)\s+$"
)
_IS = r"(?:is|are|was|be|equals?|es|est|ist|è|é)"
_LINK = re.compile(
    rf"""[\s*_`"'\])}}>]{{0,12}}
    (?:\s?\([^()\n]{{0,60}}\)                              # (in dollars)
      | [^.,;:=|\n\d$\\?!]{{0,70}}?(?=[\s*_]\W{{0,4}}{_IS}\b|[:=|])  # to the question
      | )
    (?P<link>[\s*_`"'\]}}>]{{0,8}}
      (?:\b(?:{_IS}|comes\ (?:out\ )?to)\b | [:=|是为]
        | (?:\s[-\u2013\u2014]|\u2014|-{{1,2}}>|=>|→|⇒)(?=\s)))
    """,
    re.VERBOSE | re.IGNORECASE,
)
_STARTS = re.compile(
    r"(?i)(?:^|[\n.!?:;*#<>|(\[_{\"])\s*(?:(?:the|my|our|your|final|correct|numerical)\s+){0,3}$"
)
_NOISE = re.compile(
    r"(?:[\s*_`\"'|:=\]]|>(?=\s)|(?<=\n)\d{1,2}[.)]\s+(?=[$\d-])|\$\$|\\\[|#{1,6}\s|-{2,}|(?<=\n)[-•]\s|```\w*\n|<\w+>)*"
)
_BEFORE = re.compile(
    r"(?i)\b(?:is|was|are|be|as|gives?|becomes|being)\s+(?:indeed|therefore|thus|then)?\s*"
    r"(?:the|our|my|your|an?)?\s*[*_]*"
    r"(?:(?:final|correct|right|numerical|desired|required|exact)\s+){0,2}[*_]*$"
)
_SENTENCE_END = re.compile(r"[.!?。](?=[\s*_`)\"]|$)|\n|</")
_ABBREVIATION = re.compile(r"(?i)\b(approx|rs|no|ca|vs|e\.g|i\.e)\.")


def _sentences_with_answer(text: str) -> Iterator[AnswerSpan]:
    for word in deque(_WORD.finditer(text), _MOST):
        before = text[max(0, word.start() - 80) : word.start()]
        after = text[word.end() : word.end() + _LONGEST]
        if _is_unsure(before, after):
            continue
        if content := _behind(before, after):
            yield AnswerSpan(
                content, True, word.start(), word.end() + after.find(content) + len(content)
            )
        elif _BEFORE.search(before):
            yield from _before(text, word)


def _is_unsure(before: str, after: str) -> bool:
    """Return whether a sentence does not give the answer that it speaks of: "if the answer was"."""
    link = _LINK.match(after)
    is_denied = link and re.search(r"(?i)(?:not|\bnever|n't|\bcould|\bmight)\b", link[0])
    return bool(is_denied or _UNSURE.search(before))


def _behind(before: str, after: str) -> str:
    """Return the sentence behind "answer is", or the lines below a heading; "" if none follows."""
    link = _LINK.match(after)
    is_direct = _STARTS.search(before) and re.match(
        r"[\s*_`\"\])}>#:]*(?:\n|[-+]?[$\\(]*\d)", after
    )
    if not link and not is_direct:  # "Answer 18", but not "many answer 18"
        return ""
    start = link.end() if link else int(after.startswith(">"))
    return _first_sentence(after[start:])


def _first_sentence(text: str) -> str:
    noise = _NOISE.match(text)
    text = _ABBREVIATION.sub(r"\1", text[noise.end() if noise else 0 :])
    end = _SENTENCE_END.search(text)
    if end:
        text = text[: end.end() if end[0] == "?" else end.start()]
    return text.strip()


def _before(text: str, word: re.Match[str]) -> Iterator[AnswerSpan]:
    """Yield the part of a sentence before "is the answer"."""
    left = text[max(0, word.start() - 300) : word.start()]
    left = left[: (found.start() if (found := _BEFORE.search(left)) else len(left))]
    parts = _SENTENCE_END.split(left)
    content = re.sub(r",?\s*\b(?:which|that|this|it)\s*$", "", parts[-1].strip())
    content = re.sub(r"(?i)^\W*(?:so|thus|therefore|hence|then)\b[,\s]*", "", content)
    if content:
        yield AnswerSpan(content, False, word.start(), word.end())


def _speaks_unsurely(sentence: str) -> bool:
    return any(
        _is_unsure(
            sentence[max(0, word.start() - 80) : word.start()], sentence[word.end() :][:_LONGEST]
        )
        for word in deque(_WORD.finditer(sentence), _MOST)
    )


# -- sentences -------------------------------------------------------------------------------------

_BOLD = re.compile(r"\*\*([^*\n]{1,200})\*\*(\s*:)?")
_BULLET = re.compile(r"^\s*(?:[-*•>]\s+)+")


def _last_sentences(text: str) -> Iterator[AnswerSpan]:
    for line in islice(reversed(text.splitlines()), _MOST):
        sentences = [
            each
            for each in re.split(r"(?<=[.!?;。])\s+", _BULLET.sub("", line).strip())
            if each.strip()
        ]
        for sentence in islice(reversed(sentences), _MOST):
            bold = [
                text
                for text, colon in _BOLD.findall(sentence)
                if re.search(r"\d", text) and not colon and not text.endswith(":")
            ]
            if len(bold) == 1 and not _WORD.search(sentence):
                yield AnswerSpan(bold[0], False)
            if not _speaks_unsurely(sentence):
                yield AnswerSpan(sentence[-_LONGEST:], False)
            elif " but " in sentence and not _speaks_unsurely(
                part := sentence.rpartition(" but ")[2]
            ):
                yield AnswerSpan(part, False)


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
    return re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+", lambda found: f"^{{{found[0].translate(_SUPERSCRIPTS)}}}", text)


def plain(text: str) -> str:
    """Return `text` without Markdown, currency signs and the LaTeX that only sets type."""
    text = powers(text).translate(_CHARACTERS)
    for pattern, new in _RULES:
        text = pattern.sub(new, text)
    return text
