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

from producer_workers.judges.response_text import answer_text, without_thoughts
from rolloutmq.extensions.answers.values import BOX_END, BOX_START, FACTORIAL
from rolloutmq.extensions.answers.words import kind_of

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


def spans(response: str) -> Iterator[AnswerSpan]:
    """Yield possible answers of a response, the most probable first."""
    said = without_thoughts(answer_text(response))
    if said is None:
        return
    text = said.translate(_ASCII)
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
_TAG = re.compile(r"<(answer|final|final_answer)>([^<]{1,1000})</\1>")
_JOINED = re.compile(r"[\s$.]*(?:,|;|or|and|\\text\{ ?(?:or|and) ?\}|\\quad)*[\s$]*(?:\w\s*=\s*)?")
_BESIDE = 200  # characters beside a box that are read
_BEGINS = re.compile(r"[.!?。](?=\s)|\n\s*\n|<[/\w][^<>\n]{0,40}>")
_ENDS = re.compile(r"(?:[.?。](?=\$)|[.!?。](?=[\s*_`)\"]|$))|\n\s*\n|\n#|</")
_TAKEN_BACK = re.compile(
    r"(?i)\b(?:(?P<wrong>"
    r"(?:that|this|it)(?:'s| is| was) (?:wrong|incorrect|not (?:right|correct|true))|"
    r"i made (?:a|an) (?:mistake|error)|scratch that|oops|correction\b|on second thought|i meant)|"
    r"(?<![a-zA-Z,] )(?:no,|(?:no,? )?(?:wait|actually|hold on)\b)|hmm+\b|"
    r"it should(?: actually| rather)? be|or rather\b)"
)


def _boxes(text: str) -> Iterator[AnswerSpan]:
    r"""Yield the last boxes with the sentence around; "\boxed{1} and \boxed{2}" is one answer."""
    found: list[AnswerSpan] = []
    for box in _braced(text):
        if not box.text.strip():
            continue
        between = text[found[-1].end : box.start] if found else ""
        if between.strip(" $.\n") and len(between) < 40 and _JOINED.fullmatch(between):
            last = found.pop()
            box = AnswerSpan(f"{last.text}{between}{box.text}", True, last.start, box.end)
        found.append(box)
    for token in deque(_BOXED_TOKEN.finditer(text), _MOST):
        found.append(AnswerSpan(token[1], True, *token.span()))
    for tag in deque(_TAG.finditer(text), _MOST):
        found.append(AnswerSpan(tag[2], True, *tag.span()))
    for box in found:
        yield box if box.text == _CUT_OFF else _with_neighbours(text, box)


def _with_neighbours(text: str, box: AnswerSpan) -> AnswerSpan:
    """Return what a box holds, marked as such in the sentence around it."""
    held = re.sub(r"!\s*$", FACTORIAL, box.text)  # in a formula, no exclamation
    left = text[max(0, box.start - _BESIDE) : box.start]
    left = left[max((begin.end() for begin in _BEGINS.finditer(left)), default=0) :]
    right = text[box.end : box.end + _BESIDE]
    if end := _ENDS.search(right):
        right = right[: end.end() if end[0] == "?" else end.start()]
    return box._replace(text=f"{left}{BOX_START}{held}{BOX_END}{right}")


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
    r"(?i)(?<![/\w\\-])(?:answers?|ans|antwort|lösung|réponse|respuesta|risposta|resposta|ответ|"
    r"jawaban|cevap|odpowiedź|antwoord|जवाब|उत्तर)(?![\w-]|>[^<]{1,1000}</)|答案|答え|정답|الجواب|الإجابة"
)
_UNSURE = re.compile(
    r"(?i)\b(?:(?:not|never|doubt|if|whether|suppose|assum\w+|wrong|incorrect|false|previous|"
    r"earlier|initial|old|tempting|possible|might|may|could)|\w+n't)\b[^.,:;!?\n]*$"
    r"|\b(?:to|can|cannot|could|will|must|we|i|you)\s+$"
    r"|\b(?:of|than|twice|thrice|half|double|triple|times|plus|minus)\s+(?:\w+\s+){0,2}$"
)
_IS = r"(?:is|are|was|be|equals?|es|est|ist|è|é)"
_WAS = re.compile(r"(?<!\bout)(?<!\bhas)\s+to\s+be\b")  # used to be, is said to be
_CHANGES = ("plus", "minus", "times", "squared", "cubed", "divided", "multiplied")
_LINK = re.compile(
    rf"""[\s*_`"'\])}}>]{{0,12}}
    (?:\s?\([^()\n]{{0,60}}\)                              # (in dollars)
      | [^.,;:=|\n\d$\\?!]{{0,70}}?(?=[\s*_]\W{{0,4}}{_IS}\b|(?<![<>!])[:=|])  # to the question
      | )
    (?P<link>[\s*_`"'\]}}>]{{0,8}}
      (?:\b(?:{_IS}|comes\ (?:out\ )?to)\b | (?<![<>!])[:=|是为]
        | (?:\s[-\u2013\u2014]|\u2014|-{{1,2}}>|=>|→|⇒)(?=\s)))
    """,
    re.VERBOSE | re.IGNORECASE,
)
_STARTS = re.compile(
    r"(?i)(?:^|[\n.!?:;*#<>|(\[_{\"])\s*(?:(?:the|my|our|your|final|correct|numerical)\s+){0,3}$"
)
_NOISE = re.compile(
    r"(?:[\s*_`\"'|:=\]]|(?<=\n)>(?=\s)|(?<=\n)\d{1,2}[.)]\s+(?=[$\d-])|\$\$|\\\[|#{1,6}\s|-{2,}|(?<=\n)[-•]\s|```\w*\n|<\w+>)*"
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
    is_denied = link and any(
        kind_of(word) in "dNrM" or word in _CHANGES
        for word in re.findall(r"[^\W\d_']+(?:'\w+)?", link[0])
    )
    is_past = link and _WAS.search(link[0])
    return bool(is_denied or is_past or _UNSURE.search(before))


def _behind(before: str, after: str) -> str:
    """Return the sentence behind "answer is", or the lines below a heading; "" if none follows."""
    link = _LINK.match(after)
    is_direct = _STARTS.search(before) and re.match(
        r"[\s*_`\"\])}>#:]*(?:\n|[-+]?[$\\(]*\d)", after
    )
    if not link and not is_direct:  # "Answer 18", but not "many answer 18"
        return ""
    text = after[link.end() if link else int(after.startswith(">")) :]
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
            for each in re.split(r"(?<=[.!?;。])(?<!\b[A-Z]\.)\s+", _BULLET.sub("", line).strip())
            if each.strip()
        ]
        for sentence in islice(reversed(sentences), _MOST):
            bold = [
                AnswerSpan(found[1], False, *found.span())
                for found in _BOLD.finditer(sentence)
                if re.search(r"\d", found[1]) and not found[2] and not found[1].endswith(":")
            ]
            if len(bold) == 1 and not _WORD.search(sentence):
                yield _with_neighbours(sentence, bold[0])
            if not _speaks_unsurely(sentence):
                yield AnswerSpan(sentence[-_LONGEST:], False)
            elif " but " in sentence and not _speaks_unsurely(
                part := sentence.rpartition(" but ")[2]
            ):
                yield AnswerSpan(part, False)


_AMBIGUOUS = re.compile(r"\d,\d|\d\.\d{3}")
_COMMA_WORDS = frozenset({
    "antwort", "beträgt", "lautet", "ergebnis", "lösung", "ergibt", "réponse", "résultat", "égale",
    "respuesta", "resultado", "solución", "risposta", "risultato", "resposta", "ответ", "равно",
    "odpowiedź", "antwoord", "svar",
})  # fmt: skip
_COMMA_HINTS = frozenset({
    "der", "das", "und", "ist", "sind", "est", "les", "une", "dans", "los", "las", "del", "della",
    "gli", "são", "uma", "не", "это", "het", "een", "och",
})  # fmt: skip


def has_decimal_commas(text: str, response: str) -> bool:
    """Return whether a text with numbers is in a language that writes 3,14 for 3.14."""
    if not _AMBIGUOUS.search(text):
        return False
    words = set(re.findall(r"[^\W\d_]+", response[-_TAIL:].lower()))
    return bool(words & _COMMA_WORDS) or len(words & _COMMA_HINTS) > 1
