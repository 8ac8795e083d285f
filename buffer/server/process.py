"""Logs as one JSON line per entry, written by orjson: for files that programs and people read
later.

A child process does not outlive the process that started it.

`rolloutmq run` may be killed with SIGKILL, which it cannot pass on: its children notice that they
were orphaned and end themselves as if they had been told to stop. Nothing is lost: that is what
leases and checkpoints are for.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from typing import Any, TextIO

import orjson

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """time, level, run, role, id, logger, message, then whatever the caller gave as `extra` (gid,
    step, …).
    """

    def __init__(self, role: str, run: str, name: str) -> None:
        super().__init__()
        self._who = {"run": run, "role": role, "id": name}

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S") + f".{int(record.msecs):03d}",
            "level": record.levelname.lower(),
            **self._who,
            "logger": record.name,
            "message": record.getMessage(),
        }
        entry |= {name: value for name, value in vars(record).items() if name not in _STANDARD}
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(entry, default=str).decode()


class _Stderr(logging.StreamHandler[TextIO]):
    """Writes to what stderr is at that time: a bar that is drawn there puts lines above itself."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr


def log_json(role: str, run: str, name: str = "", level: int = logging.INFO) -> None:
    """Send this process's log to stderr as JSON lines; libraries only from warnings on. `name`:
    which of its role.
    """
    handler = _Stderr()
    handler.setFormatter(JsonFormatter(role, run, name or role))
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.getLogger("rolloutmq").setLevel(level)


OWNER = "ROLLOUTMQ_OWNER_PID"
"""Environment variable that names the process to follow."""

_POLL_S = 1.0


def follow_owner() -> None:
    """Send this process SIGTERM once the process in `OWNER` is no longer its parent. Does nothing
    without one.
    """
    owner = os.environ.get(OWNER)
    if owner:
        threading.Thread(target=_watch, args=(int(owner),), name="lifeline", daemon=True).start()


def _watch(owner: int) -> None:
    stopped = threading.Event()
    while os.getppid() == owner:
        stopped.wait(_POLL_S)
    os.kill(os.getpid(), signal.SIGTERM)
