"""Why a user's code failed, with its own traceback as text, which crosses processes.

Frames of this project and of libraries are left out. A log shows the traceback of a cause once.
"""

from __future__ import annotations

import logging
import sys
import traceback
from collections import Counter
from pathlib import Path

from buffer.errors import UserCodeError, describe
from buffer.failure_text import cause_of, join_text, trace_text

log = logging.getLogger("rolloutmq.worker")

_ROOT = Path(__file__).parents[2]
_OURS = tuple(
    f"{_ROOT / name}/" for name in ("buffer", "consumer", "producer_workers", "rolloutmq")
)
_LIBRARIES = (f"{sys.prefix}/", f"{sys.base_prefix}/", "<")

RAISED = Counter[str]()  # failures of this process, by cause


def user_trace(error: BaseException) -> str:
    """Return the traceback of a user's code (`trace_text`), also of what the error was raised from.

    "" if code of this project raised the error and called no code of a user.
    """
    lines: list[str] = []
    following: BaseException | None = error
    for _ in range(3):  # the error, and what it was raised from
        if following is None:
            break
        if isinstance(following, UserCodeError) and following.trace:
            return following.trace
        if isinstance(following, BaseExceptionGroup):
            lines += _lines(following)
            following = following.exceptions[0]
        else:
            lines = _lines(following) + lines
            hidden = following.__suppress_context__
            following = following.__cause__ or (None if hidden else following.__context__)
    return trace_text(lines) if lines else ""


def _lines(error: BaseException) -> list[str]:
    """Return the traceback of one error, with the innermost frames in a user's code.

    Without any, show frames in libraries, which a user's code may be, unless code of this project
    raised the error.
    """
    found = traceback.extract_tb(error.__traceback__)
    others = [each for each in found if not each.filename.startswith(_OURS)]
    users = [each for each in others if is_of_user(each.filename)]
    if not others or (not users and found[-1].filename.startswith(_OURS)):
        return []
    frames = traceback.format_list((users or others)[-8:])
    shown = "".join(frames).rstrip("\n").split("\n")
    return ["Traceback (most recent call last):", *shown, describe(error)]


def is_of_user(file: str) -> bool:
    """Return whether code is neither this project's nor a library's."""
    return not file.startswith((*_OURS, *_LIBRARIES)) and "/site-packages/" not in file


def log_once(text: str) -> None:
    """Log the first failure of a cause with its traceback; of later ones the 10th, 100th, ….

    `text`: of the failure (`buffer.failure_text`).
    """
    cause = cause_of(text)
    if cause not in RAISED and len(RAISED) >= 1000:
        RAISED.clear()
    RAISED[cause] += 1
    times = RAISED[cause]
    if times == 1:
        log.warning("%s", text)
    elif times in (10**power for power in range(1, 12)):
        log.warning("raised %d times in this process: %s", times, cause)


def failure_text(error: BaseException) -> str:
    """Return an error as the text of a failure (`buffer.failure_text`)."""
    said = str(error) if isinstance(error, UserCodeError) else describe(error)
    return join_text(said, user_trace(error))


def log_failure(error: BaseException) -> str:
    """Log an error's traceback once for its cause, unless its call has; return `failure_text`."""
    text = failure_text(error)
    if "\n" in text and not getattr(error, "trace", ""):
        log_once(text)
    return text
