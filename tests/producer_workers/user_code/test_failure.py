from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from buffer.errors import JudgeError
from buffer.failure_text import LONGEST_TEXT, cause_of, cut_text, message_of, trace_of
from producer_workers.config.task import JudgingSection
from producer_workers.judges.judge import Judge
from producer_workers.judges.load import load_judge, load_worker_judge
from producer_workers.user_code import failure
from producer_workers.user_code.failure import failure_text, log_failure
from tests.producer_workers.user_code import broken
from tests.producer_workers.user_code.test_containment import rollout

FILE = Path(broken.__file__)

CAUSES = {
    "score": ("ValueError", "wrapped"), "fail": ("KeyError", "plain"), "own": ("not today", "own"),
    "endless": ("RecursionError", "deep"), "shouts": ("RuntimeError", "long"),
    "later": ("IndexError", "inner"),
}  # fmt: skip
"""What each function of `broken` raises, and the mark of its line."""


def line_of(mark: str) -> int:
    lines = FILE.read_text().split("\n")
    return next(n for n, line in enumerate(lines, 1) if line.endswith(f"# {mark}"))


def judge_of(name: str, where: str) -> Judge:
    spec = f"{broken.__name__}:{name}"
    return load_judge(spec) if where == "here" else load_worker_judge(spec, JudgingSection())


@pytest.mark.parametrize("where", ["here", "process"])
@pytest.mark.parametrize("name", CAUSES)
async def test_a_judge_that_raises_is_known_by_its_own_line(name: str, where: str) -> None:
    kind, mark = CAUSES[name]
    judge = judge_of(name, where)
    with pytest.raises(JudgeError) as raised:
        await judge.judge(rollout("an answer"))
    judge.close()
    text = failure_text(raised.value)
    assert cause_of(text) == f"{kind} at broken.py:{line_of(mark)}"
    assert f'File "{FILE}", line {line_of(mark)}' in trace_of(text)
    for ours in ("border.py", "user_function.py", "function_server.py", "asyncio"):
        assert ours not in text
    assert cut_text(text) == text
    assert len(text) <= LONGEST_TEXT
    assert "\n" not in message_of(text)


async def test_what_an_error_was_raised_from_is_shown_with_its_line_of_source() -> None:
    with pytest.raises(JudgeError) as raised:
        await judge_of("score", "here").judge(rollout("an answer"))
    trace = trace_of(failure_text(raised.value))
    inner, wrapped = trace.find('response.split("=")[1]'), trace.find("raise ValueError(")
    assert 0 < inner < wrapped


def test_a_cause_is_logged_with_its_traceback_once_and_then_counted(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failure, "RAISED", Counter())
    with caplog.at_level(logging.WARNING, "rolloutmq.worker"):
        for number in range(72):
            log_failure(_raised(broken.fail, response=str(number)))
        log_failure(_raised(broken.own))
    said = [record.getMessage() for record in caplog.records]
    assert [text.count("Traceback") for text in said] == [1, 0, 1]
    assert "10 times" in said[1]


def _raised(function: Any, **given: Any) -> BaseException:
    try:
        function(**given)
    except Exception as error:
        return error
    raise AssertionError
