"""The log of every process of a run: JSON lines on stderr."""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, TextIO

import orjson

from buffer.readable import visible

MINUTE_S = 60.0
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """Formats a record as JSON: time, level, run, role, id, logger, message, and `extra`."""

    def __init__(self, role: str, run: str, name: str) -> None:
        super().__init__()
        self._process = {"run": run, "role": role, "id": name}

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S") + f".{int(record.msecs):03d}",
            "level": record.levelname.lower(),
            **self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        entry |= {name: value for name, value in vars(record).items() if name not in _STANDARD}
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return visible(orjson.dumps(entry, default=str).decode())


class OncePerMinute(logging.Filter):
    """Passes one record of each cause in a minute, with the number of those that it left out.

    A cause is an exception of one type from one line, reported by one call; records without an
    exception all pass.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._causes: dict[tuple[str, ...], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to write a record; count the records of its cause that were left out."""
        cause = _cause(record)
        if cause is None:
            return True
        now = self._clock()
        since, left_out = self._causes.get(cause, (-math.inf, 0))
        if now - since < MINUTE_S:
            self._causes[cause] = (since, left_out + 1)
            return False
        if len(self._causes) >= 1000:
            self._causes.clear()
        self._causes[cause] = (now, 0)
        if left_out:
            record.left_out = left_out
        return True


def _cause(record: logging.LogRecord) -> tuple[str, ...] | None:
    values = record.args.values() if isinstance(record.args, Mapping) else record.args or ()
    error = next((value for value in values if isinstance(value, BaseException)), None)
    if record.exc_info and record.exc_info[1]:
        error = record.exc_info[1]
    if error is None:
        return None
    frame = error.__traceback__
    while frame and frame.tb_next:
        frame = frame.tb_next
    line = f"{frame.tb_frame.f_code.co_filename}:{frame.tb_lineno}" if frame else ""
    return (record.name, str(record.msg), type(error).__name__, line)


class _Stderr(logging.StreamHandler[TextIO]):
    """Writes to the current sys.stderr: a progress bar replaces it, to put lines above itself."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr


def log_json(role: str, run: str, name: str = "") -> None:
    """Write this process's log to stderr as JSON lines, and that of libraries from warnings on.

    Errors of one cause appear once a minute. `name` tells processes of one role apart.
    """
    handler = _Stderr()
    handler.setFormatter(JsonFormatter(role, run, name or role))
    handler.addFilter(OncePerMinute())
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.getLogger("rolloutmq").setLevel(logging.INFO)
