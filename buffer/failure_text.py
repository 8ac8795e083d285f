"""The text of a failure: a line that says what happened, then the user's traceback, indented.

It is all that other processes and dead letters get of an exception. One text may hold several
failures, one after the other.
"""

from __future__ import annotations

import re
from itertools import takewhile

from buffer.readable import visible

LONGEST_TRACE = 2500  # characters
LONGEST_TEXT = 3500  # characters, of which JSON needs at most four bytes each

_FRAME = re.compile(r'^ +File "(.+)", line (\d+), in (.+)$', re.MULTILINE)
_RAISED = re.compile(r"\braised ([A-Z]\w*)")
_TYPE = re.compile(r"(\w+)(?=: |$)")
_NUMBER = re.compile(r"0x[0-9a-fA-F]+|\d+(\.\d+)?")


def trace_text(lines: list[str]) -> str:
    """Return a traceback as it stands in a failure's text; of a long one, its end."""
    text = visible("\n".join(line[:200] for line in lines))[-LONGEST_TRACE:]
    return "\n".join(f"  {line}" for line in text.split("\n"))


def join_text(message: str, trace: str) -> str:
    """Return the text of a failure: its message as one line, and its trace (`trace_text`)."""
    line = visible(" ".join(message.split()))
    return f"{line}\n{trace}" if trace else line


def cut_text(text: str) -> str:
    """Return a text that fits a dead letter, without control characters."""
    return visible(text)[:LONGEST_TEXT]


def places(text: str) -> list[str]:
    """Return the user's lines in a text as "file:line in function", the innermost last."""
    return [f"{file}:{line} in {name}" for file, line, name in _FRAME.findall(text)]


def message_of(text: str) -> str:
    """Return what happened in one line, without tracebacks."""
    return "; ".join(line for line in text.strip().split("\n") if not _is_trace(line))


def trace_of(text: str) -> str:
    """Return the first traceback, "" without one."""
    lines = text.strip("\n").split("\n")[1:]
    return "\n".join(line[2:] for line in takewhile(_is_trace, lines))


def headline(text: str, longest: int) -> str:
    """Return the first failure and its user's line in one line, in `longest` characters."""
    line, where = _first(text)
    at = f" (at {where})" if where else ""
    return line[: max(0, longest - len(at))] + at


def cause_of(text: str) -> str:
    """Return what failures with one cause have in common.

    This is the type of the exception and the line of the user's code: "KeyError at judge.py:12".
    Without such a line it is the message, with … for its numbers.
    """
    line, where = _first(text)
    kind = (_RAISED.search(line) or _TYPE.match(line)) if where else None
    said = kind[1] if kind else _NUMBER.sub("…", line)[:160]
    return f"{said} at {where}" if where else said or "no reason was given"


def _first(text: str) -> tuple[str, str]:
    """Return the line of the first failure, and where it was raised as "file.py:12", or ""."""
    frames = _FRAME.findall(trace_of(text))
    where = f"{frames[-1][0].rpartition('/')[2]}:{frames[-1][1]}" if frames else ""
    return text.strip().partition("\n")[0], where


def _is_trace(line: str) -> bool:
    return line.startswith("  ")
