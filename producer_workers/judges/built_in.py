"""Score responses with the built-in judges, which compare the text with the `ground_truth`.

`python_tests` and some verifiers of `reasoning_gym` need processes (judging of kind rq): programs
come from a model.
"""

from __future__ import annotations

import ast
import re
import secrets
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import orjson

from buffer.errors import ConfigError
from buffer.wire.group import UNPARSED
from buffer.wire.own_copy import own_copy
from buffer.wire.rollout import RolloutState
from producer_workers.config.sandbox import BUBBLEWRAP
from producer_workers.judges.response_text import answer_text, text_of, without_thoughts
from producer_workers.user_code.sandbox import Limits, run_program

SOURCE_PREFIX = "reasoning_gym/"
# Their verifiers pass the answer to eval, or to sympy's parse_expr, which evals. A test checks that
# the list is complete.
UNSAFE_TASKS = frozenset({
    "binary_matrix", "countdown", "intermediate_integration", "n_queens",
    "polynomial_multiplication", "puzzle24", "simple_integration", "spiral_matrix",
    "string_insertion",
})  # fmt: skip


def no_score(*, response: str, ground_truth: Any = None, state: object = None) -> float:
    """Return 0, for tasks that are learned from teachers alone."""
    return 0.0


def exact_match(*, response: str, ground_truth: Any, state: object = None) -> float:
    """Return 1.0 for the same text, apart from white space around it. Raises ValueError."""
    return float(answer_text(response) == text_of(ground_truth))


def python_tests(
    *, response: str, ground_truth: Any, state: object = None, sandbox: str = BUBBLEWRAP
) -> dict[str, float]:
    """Run the response as a program: "score" is the share of passed tests, "passed_all" 0 or 1.

    `ground_truth`: see `tests_of`; what a program prints is compared without trailing white space.
    The program is the last Python block of the response (`program_of`), and runs in `sandbox`
    (`producer_workers.user_code.sandbox`); "unparsed" is 1 without one.
    """
    tests = tests_of(ground_truth)
    program = program_of(response)
    if program is None:
        return {"score": 0.0, "passed_all": 0.0, UNPARSED: 1.0}
    passed = [_passes(program, test, sandbox) for test in tests]
    score = sum(passed) / len(passed)
    return {"score": score, "passed_all": float(all(passed)), UNPARSED: 0.0}


_LIMITS = Limits(time_s=10.0, output_kb=16 * 1024)  # all that `file_mb` lets a program print


def _passes(program: str, test: Test, sandbox: str) -> bool:
    if not test.asserts:
        outcome = run_program(program, test.stdin, _LIMITS, sandbox)
        return outcome.exit_code == 0 and _lines(outcome.stdout) == _lines(test.stdout)
    # A program that exits before its test has not passed it, so the test must print a mark.
    mark = secrets.token_hex(8)
    tested = f"{program}\n\n{test.asserts}\n\nprint('\\n{mark}')\n"
    outcome = run_program(tested, "", _LIMITS, sandbox)
    return outcome.exit_code == 0 and outcome.stdout.endswith(f"\n{mark}\n")


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]


# A fence of Markdown, in a list or a quotation, too. The one that closes is bare, and as long.
_FENCE = re.compile(
    r"(?P<indent>[ \t>]*(?:[-*+]|\d{1,3}[.)])?[ \t]*)(?P<fence>`{3,}|~{3,})(?P<info>[^`]*)$"
)
_PYTHON = re.compile(r"\W*(?:i?python|py)[\d.]*\b", re.IGNORECASE)
_END = re.compile(r"[ \t>]*(?:`{3,}|~{3,})[ \t]*$")


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
        near = bare[first : first + 16]  # a docstring may hold some
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


def reasoning_gym_score(*, response: str, ground_truth: Any, state: RolloutState) -> float:
    """Return the score of reasoning-gym's verifier, 0.0 to 1.0, for a problem of `write_problems`.

    Many verifiers give part of the score to an answer that contains the right one.
    """
    source = state.data_source or ""
    if not source.startswith(SOURCE_PREFIX):
        raise ValueError(f"data_source is {source!r}, not {SOURCE_PREFIX}<task>")
    question = next((m["content"] for m in reversed(state.messages) if m.get("role") == "user"), "")
    name = source.removeprefix(SOURCE_PREFIX)
    return score_entry(name, answer_text(response), question, ground_truth, state.extra)


def score_entry(
    name: str, answer: str, question: str, truth: Any, extra: Mapping[str, Any]
) -> float:
    """Score `answer` to the problem of `question`, `truth` and `extra` (metadata and config)."""
    config = orjson.dumps(extra.get("config", {}), option=orjson.OPT_SORT_KEYS)
    entry = {"question": question, "answer": truth, "metadata": own_copy(extra.get("metadata", {}))}
    verifier = _verifier(name, config)
    try:
        return float(verifier.score_answer(answer, entry))
    except Exception:  # some verifiers raise on text that they cannot parse
        # If the right answer can be scored, the model's is wrong. If not, this raises: the problem
        # is broken.
        verifier.score_answer(truth if truth is not None else "", entry)
        return 0.0


def task_datasets() -> dict[str, tuple[Any, Any]]:
    """Return all tasks of reasoning-gym: name to (data set class, configuration class)."""
    # The whole package, not its factory: tasks register while it is imported, and judges run in
    # several threads. Only this form waits for an import that another thread has started.
    import reasoning_gym

    return dict(reasoning_gym.factory.DATASETS)


def check_safe(name: str) -> None:
    """Raise ConfigError for a task whose verifier runs what a model wrote."""
    if name in UNSAFE_TASKS:
        raise ConfigError(
            f"reasoning-gym task {name!r} is refused: "
            "its verifier runs eval() on what the model wrote",
            hint="use another task, or judge it in a sandbox of your own",
        )


@lru_cache(maxsize=256)
def _verifier(name: str, config: bytes) -> Any:
    """Build the task's data set, whose config some verifiers read."""
    check_safe(name)
    dataset_class, config_class = task_datasets()[name]
    return dataset_class(config=config_class(**orjson.loads(config)))


def parity(*, response: str, ground_truth: Any, state: RolloutState) -> float:
    """Return 1.0 for token ids with an odd sum, else 0.0: a test for models with random weights."""
    return float(int(state.response_ids.sum()) % 2)
