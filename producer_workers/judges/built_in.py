"""Score responses with the built-in judges, from exact text to running programs.

Each compares the text of a response with the `ground_truth` of its problem. `math_verify`,
`python_tests` and some verifiers of `reasoning_gym` belong into a process of their own (judging of
kind rq): simplifying may never end, and programs are a model's own.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from decimal import Decimal
from functools import lru_cache
from typing import Any

import orjson

from buffer.config.sections.sandbox import BUBBLEWRAP
from buffer.errors import ConfigError
from buffer.rollouts.rollout import RolloutState
from producer_workers.user_code.program import Limits
from producer_workers.user_code.sandbox import run_program

# Decoding leaves these in the text where a tokenizer does not mark its end of turn as special.
END_MARKERS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<end_of_turn>", "</s>")

SOURCE_PREFIX = "reasoning_gym/"
# Their verifiers pass the answer to eval, or to sympy's parse_expr, which evals. A test checks that
# the list is complete.
UNSAFE_TASKS = frozenset(
    {
        "binary_matrix",
        "countdown",
        "intermediate_integration",
        "n_queens",
        "polynomial_multiplication",
        "puzzle24",
        "simple_integration",
        "spiral_matrix",
        "string_insertion",
    }
)

TEST_S = 10.0
"""Seconds for one test."""

_BLOCK = re.compile(r"```(?:python|py)?[^\S\n]*\n(.*?)```", re.DOTALL)
_NUMBER = re.compile(r"(?<![\d.,])-?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?", re.ASCII)
_LONGEST_NUMBER = 50
_MATHS = re.compile(r"\\boxed|\$|\\\(|\\\[")
_ANSWER = re.compile(
    r"(?:####|answer(?: is)?\s*:?)\s*(.+?)\s*\.?\s*$", re.IGNORECASE | re.MULTILINE
)
_TAIL_CHARS = 2000
"""Characters at the end of a response that are searched for its answer."""


def exact_match(*, response: str, ground_truth: Any, state: object = None) -> float:
    """Return 1.0 where response and ground truth are the same text, white space around them aside.

    Raises ValueError without a ground truth.
    """
    if ground_truth is None:
        raise ValueError("the problem has no ground_truth")
    return float(answer_text(response) == str(ground_truth).strip())


def gsm8k(*, response: str, ground_truth: Any, state: object = None) -> float:
    """Return 1.0 for the right final number, else 0.0, as GSM8K scores (Cobbe et al. 2021).

    The answer is the number behind "####". Without "####" it is the last number, so that a model
    that has not learned the format is scored for its arithmetic. Numbers are compared as numbers:
    1,200 is 1200.0. Raises ValueError where the ground truth holds no number.
    """
    right = final_number(str(ground_truth))
    if right is None:
        raise ValueError(f"the ground truth {ground_truth!r:.80} holds no number")
    return float(final_number(response) == right)


def final_number(text: str) -> Decimal | None:
    """Return the first number behind the last "####", or the last number of a text without one."""
    _, marker, answer = text.rpartition("####")
    numbers = _NUMBER.findall(answer[:_TAIL_CHARS] if marker else text[-_TAIL_CHARS:])
    if not numbers:
        return None
    number = numbers[0] if marker else numbers[-1]
    return Decimal(number.replace(",", "")) if len(number) <= _LONGEST_NUMBER else None


def math_verify(*, response: str, ground_truth: Any, state: object = None) -> float:
    r"""Return 1.0 for an answer that equals the ground truth as mathematics, else 0.0.

    The package math-verify compares them: 1/2 is 0.5 is \frac{1}{2}. Only its LaTeX grammar is
    used: its parser of plain expressions runs eval on what a model wrote, so a plain answer is
    wrapped as LaTeX first. Simplifying may never end, and its time limit does not work in threads.
    Raises ValueError where the ground truth holds no mathematics.
    """
    from math_verify import LatexExtractionConfig, parse, verify

    def read(text: str) -> list[Any]:
        # Without its time limit, which only works in a main thread: the rq job has one.
        config = [LatexExtractionConfig()]
        return list(parse(as_latex(text), extraction_config=config, parsing_timeout=None))

    truth = read(str(ground_truth))
    if not truth:
        raise ValueError(f"the ground truth {ground_truth!r:.80} holds no mathematics")
    return float(verify(truth, read(answer_text(response)), timeout_seconds=None))


def as_latex(text: str) -> str:
    """Return the end of `text`, with its answer in dollars where it has no LaTeX."""
    text = text[-_TAIL_CHARS:]
    if _MATHS.search(text):
        return text
    if answers := _ANSWER.findall(text):
        return f"${answers[-1]}$"
    if "\n" not in text and len(text) <= 100:
        return f"${text}$"
    number = final_number(text)
    return f"${number}$" if number is not None else text


def python_tests(
    *, response: str, ground_truth: Any, state: object = None, sandbox: str = BUBBLEWRAP
) -> dict[str, float]:
    """Run the response as a program: {"score": share of passed tests, "passed_all": 0 or 1}.

    `ground_truth` is Python that asserts (one test), a list of such texts, or a list of {"input":
    …, "output": …}: what the program gets on stdin, and what it must print (white space at the ends
    of lines aside). The program is the last ```python block of the response, or all of it. It runs
    in `sandbox` (`producer_workers.user_code.sandbox`). Raises ValueError where the ground truth is
    not a test.
    """
    tests = ground_truth if isinstance(ground_truth, list) else [ground_truth]
    if not tests or not all(map(_is_test, tests)):
        raise ValueError(f"the ground truth {ground_truth!r:.80} holds no tests")
    program = program_of(response)
    passed = [_passes(program, test, sandbox) for test in tests]
    return {"score": sum(passed) / len(passed), "passed_all": float(all(passed))}


def program_of(response: str) -> str:
    """Return the last Python block of a response, or all of it."""
    blocks = _BLOCK.findall(response)
    return str(blocks[-1]) if blocks else response


def _is_test(test: Any) -> bool:
    return isinstance(test, str) or (isinstance(test, dict) and {"input", "output"} <= set(test))


def _passes(program: str, test: Any, sandbox: str) -> bool:
    limits = Limits(time_s=TEST_S)
    if isinstance(test, dict):
        outcome = run_program(program, str(test["input"]), limits, sandbox)
        return outcome.exit_code == 0 and _lines(outcome.stdout) == _lines(str(test["output"]))
    # A program that exits before its test has not passed it, so the test must print a mark.
    mark = secrets.token_hex(8)
    tested = f"{program}\n\n{test}\n\nprint('\\n{mark}')\n"
    outcome = run_program(tested, "", limits, sandbox)
    return outcome.exit_code == 0 and outcome.stdout.endswith(f"\n{mark}\n")


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]


def reasoning_gym_score(*, response: str, ground_truth: Any, state: RolloutState) -> float:
    """Return the score of reasoning-gym's verifier, 0.0 to 1.0, for a problem of `write_problems`.

    The verifier gets the whole answer, without end markers. Many give part of the score to an
    answer that contains the right one; "solved" is a score of 1.0.
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
    entry = {"question": question, "answer": truth, "metadata": extra.get("metadata", {})}
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
    """Build the task's data set, whose config some verifiers read, once for each source."""
    check_safe(name)
    dataset_class, config_class = task_datasets()[name]
    return dataset_class(config=config_class(**orjson.loads(config)))


def parity(*, response: str, ground_truth: Any, state: RolloutState) -> float:
    """Return 1.0 where the token ids of the response add up to an odd number, else 0.0.

    It tests the machinery: models with random weights solve nothing, and equal rewards teach
    nothing.
    """
    return float(int(state.response_ids.sum()) % 2)


def answer_text(response: str) -> str:
    """Return `response` without surrounding white space and trailing end markers."""
    text = response.strip()
    while text.endswith(END_MARKERS):
        marker = next(marker for marker in END_MARKERS if text.endswith(marker))
        text = text.removesuffix(marker).rstrip()
    return text
