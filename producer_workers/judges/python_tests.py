"""Scores a program by running it: the share of its tests that it passes.

`ground_truth` is Python that asserts (one test), a list of such texts, or a list of {"input": …, "output": …}: what the
program is given on stdin, and what it must print (white space at the ends of lines aside). The program is the last
```python block of the response, or all of it. It runs in `producer_workers.sandbox`, out of a process of its own
(judging of kind rq).
"""

from __future__ import annotations

import re
import secrets
from typing import Any

from producer_workers.sandbox import Limits, run_python

TEST_S = 10.0
"""Seconds for one test."""

_BLOCK = re.compile(r"```(?:python|py)?[^\S\n]*\n(.*?)```", re.DOTALL)


def python_tests(*, response: str, ground_truth: Any, state: object = None) -> dict[str, float]:
    """{"score": share of passed tests, "passed_all": 0 or 1}. Raises ValueError where the ground truth is no test."""
    tests = ground_truth if isinstance(ground_truth, list) else [ground_truth]
    if not tests or not all(map(_is_test, tests)):
        raise ValueError(f"the ground truth {ground_truth!r:.80} holds no tests")
    program = program_of(response)
    passed = [_passes(program, test) for test in tests]
    return {"score": sum(passed) / len(passed), "passed_all": float(all(passed))}


def program_of(response: str) -> str:
    blocks = _BLOCK.findall(response)
    return str(blocks[-1]) if blocks else response


def _is_test(test: Any) -> bool:
    return isinstance(test, str) or (isinstance(test, dict) and {"input", "output"} <= set(test))


def _passes(program: str, test: Any) -> bool:
    limits = Limits(time_s=TEST_S)
    if isinstance(test, dict):
        outcome = run_python(program, str(test["input"]), limits)
        return outcome.exit_code == 0 and _lines(outcome.stdout) == _lines(str(test["output"]))
    # a program that ends before its test did not pass it
    mark = secrets.token_hex(8)
    outcome = run_python(f"{program}\n\n{test}\n\nprint('\\n{mark}')\n", "", limits)
    return outcome.exit_code == 0 and outcome.stdout.endswith(f"\n{mark}\n")


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]
