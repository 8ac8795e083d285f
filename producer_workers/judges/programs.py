"""Find the program in a response, and the tests in a ground truth."""

from __future__ import annotations

import ast
import re
from bisect import bisect_left
from collections.abc import Iterator
from typing import Any, NamedTuple

import orjson

from producer_workers.judges.response_text import answer_text, without_thoughts

# A fence of Markdown, in a list or a quotation, too. The one that closes is bare, and as long.
_FENCE = re.compile(
    r"(?P<indent>[ \t>]*(?:[-*+]|\d{1,3}[.)])?[ \t]*)(?P<fence>`{3,}|~{3,})(?P<info>[^`]*)$"
)
_PYTHON = re.compile(r"\W*(?:i?python|py)[\d.]*\b", re.IGNORECASE)
_END = re.compile(r"[ \t>]*(?:`{3,}|~{3,})[ \t]*$")
_MOST_ENDS = 16  # closing fences that are tried: a docstring may hold some


class Block(NamedTuple):
    language: str
    text: str


def program_of(response: str) -> str | None:
    """Return the last Python block of a response, or the last one that names no language.

    A response without blocks is a program itself, if it is Python. Else None. What stands in
    thoughts does not count.
    """
    said = without_thoughts(answer_text(response))
    if said is None:
        return None
    blocks = list(_blocks(said.splitlines()))
    for candidates in (
        [block for block in blocks if _PYTHON.match(block.language)],
        [block for block in blocks if not block.language and block.text.strip()],
    ):
        if candidates:
            return candidates[-1].text
    return said if not blocks and said.strip() and _is_python(said) else None


def _blocks(lines: list[str]) -> Iterator[Block]:
    bare = [at for at, line in enumerate(lines) if _END.match(line)]
    at = 0
    while at < len(lines):
        opening = _FENCE.match(lines[at])
        at += 1
        if opening is None:
            continue
        fence, language = opening["fence"], opening["info"].strip()
        first = bisect_left(bare, at)
        near = bare[first : first + _MOST_ENDS]
        ends = [end for end in near if lines[end].strip(" \t>").startswith(fence)]
        ends = ends or [len(lines)]  # cut off
        texts = [_dedented(lines[at:end], opening["indent"]) for end in ends]
        chosen = 0
        if not language or _PYTHON.match(language):
            # a fence in a docstring ends no block: the shortest text that is Python counts
            chosen = next((n for n, text in enumerate(texts) if _is_python(text)), 0)
        yield Block(language, texts[chosen])
        at = ends[chosen] + 1


def _dedented(lines: list[str], indent: str) -> str:
    """Return the lines of a block without the indentation, or quotation marks, of its fence."""
    width = len(indent)
    return (
        "\n".join(line[width:] if not line[:width].strip(" \t>") else line for line in lines) + "\n"
    )


def _is_python(text: str) -> bool:
    try:
        ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


class Test(NamedTuple):
    """Python that asserts, or what a program reads and should print."""

    asserts: str = ""
    stdin: str = ""
    stdout: str = ""


_EXPECTED = (
    'expected Python that asserts, a list of such texts, or {"input": ..., "output": ...} with '
    "two texts, or with as many inputs as outputs"
)


def tests_of(truth: Any) -> list[Test]:
    """Return the tests of a ground truth, which may also be JSON as text. Raises ValueError."""
    if isinstance(truth, str) and truth.lstrip()[:1] in ("{", "["):
        try:
            truth = orjson.loads(truth)
        except orjson.JSONDecodeError as error:
            raise ValueError(f"the ground truth {truth!r:.80} holds no tests: {error}") from error
    given = truth if isinstance(truth, list) else [truth]
    tests = [test for each in given for test in _tests(each)]
    if not tests:
        raise ValueError(f"the ground truth {truth!r:.80} holds no tests: {_EXPECTED}")
    return tests


def _tests(given: Any) -> Iterator[Test]:
    if isinstance(given, str):
        if not _is_python(given):
            raise ValueError(f"the test {given!r:.80} is not Python: {_EXPECTED}")
        if not any(
            isinstance(node, ast.Assert | ast.Raise | ast.Call)
            for node in ast.walk(ast.parse(given))
        ):
            raise ValueError(f"the test {given!r:.80} asserts nothing, so every program passes it")
        yield Test(given)
        return
    if not isinstance(given, dict) or given.get("fn_name"):
        raise ValueError(f"the test {given!r:.80} cannot be run: {_EXPECTED}")
    columns = [given.get(key, given.get(f"{key}s")) for key in ("input", "output")]
    inputs, outputs = (each if isinstance(each, list) else [each] for each in columns)
    if len(inputs) != len(outputs) or not all(
        isinstance(each, str | int | float) for each in (*inputs, *outputs)
    ):
        raise ValueError(f"the test {given!r:.80} cannot be run: {_EXPECTED}")
    for stdin, stdout in zip(inputs, outputs, strict=True):
        yield Test(stdin=str(stdin), stdout=str(stdout))
