"""Why a user's code failed, with its own traceback as text, which crosses processes.

Frames of this project and of libraries are left out. A log shows the traceback of a cause once.
"""

from __future__ import annotations

import logging
import sys
import traceback
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from buffer.errors import RolloutMQError, UserCodeError, describe
from buffer.failure_text import cause_of, join_text, trace_text

if TYPE_CHECKING:
    from producer_workers.user_code.border import Border

log = logging.getLogger("rolloutmq.worker")

_ROOT = Path(__file__).parents[2]
_OURS = tuple(
    f"{_ROOT / name}/" for name in ("buffer", "consumer", "producer_workers", "rolloutmq")
)
_LIBRARIES = (f"{sys.prefix}/", f"{sys.base_prefix}/", "<")
_MOST_FRAMES = 8
_MOST_ERRORS = 3  # of a chain: the error, and what it was raised from

MOST_CAUSES = 1000  # that a process counts


def user_trace(error: BaseException) -> str:
    """Return the traceback of a user's code (`trace_text`), also of what the error was raised from.

    "" if code of this project raised the error and called no code of a user.
    """
    lines: list[str] = []
    following: BaseException | None = error
    for _ in range(_MOST_ERRORS):
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
    frames = user_frames(error)
    if not frames:
        return []
    shown = "".join(traceback.format_list(frames)).rstrip("\n").split("\n")
    return ["Traceback (most recent call last):", *shown, describe(error)]


def is_of_user(file: str) -> bool:
    """Return whether code is neither this project's nor a library's."""
    return not file.startswith((*_OURS, *_LIBRARIES)) and "/site-packages/" not in file


def user_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Return the innermost frames in a user's code, the innermost last.

    Without any, return frames in libraries, which a user's code may be, unless code of this project
    raised the error.
    """
    found = traceback.extract_tb(error.__traceback__)
    others = [each for each in found if not each.filename.startswith(_OURS)]
    users = [each for each in others if is_of_user(each.filename)]
    if not users and found and found[-1].filename.startswith(_OURS):
        return []
    return (users or others)[-_MOST_FRAMES:]


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a call has no result. It crosses from the process of a function to its caller."""

    said: str
    told: str  # the text for a model
    hint: str = ""
    trace: str = ""  # `user_trace`
    is_own: bool = False  # whether `said` is of this project, and names the function
    is_out_of_memory: bool = False

    @classmethod
    def of(cls, error: BaseException, border: Border) -> Failure:
        trace = border.trace(error)
        if isinstance(error, RolloutMQError):
            return cls(error.message, border.told(error), error.hint, trace, is_own=True)
        empty = isinstance(error, StopIteration)
        hint = "next(...) found nothing: give it a default" if empty else ""
        is_memory = isinstance(error, MemoryError)
        return cls(describe(error), border.told(error), hint, trace, is_out_of_memory=is_memory)


class CauseLog:
    """Logs the traceback of each cause once, and then how often it was raised."""

    def __init__(self) -> None:
        self._counts = Counter[str]()

    def note(self, text: str) -> None:
        """Count a failure by its text; log the first, and the 10th, 100th … of its cause."""
        cause = cause_of(text)
        if cause not in self._counts and len(self._counts) >= MOST_CAUSES:
            self._counts.clear()
        self._counts[cause] += 1
        times = self._counts[cause]
        if times == 1:
            log.warning("%s", text)
        elif times in (10**power for power in range(1, 12)):
            log.warning("raised %d times in this process: %s", times, cause)


CAUSES = CauseLog()


def failure_text(error: BaseException) -> str:
    """Return an error as the text of a failure (`buffer.failure_text`)."""
    said = str(error) if isinstance(error, UserCodeError) else describe(error)
    return join_text(said, user_trace(error))


def log_failure(error: BaseException) -> str:
    """Log an error's traceback once for its cause, unless its call has; return `failure_text`."""
    text = failure_text(error)
    if "\n" in text and not getattr(error, "trace", ""):
        CAUSES.note(text)
    return text
