"""`rolloutmq` commands forked from a process that has imported what they need.

A command that starts others with `python -m rolloutmq`, as `run` does, forks them from itself.
"""

from __future__ import annotations

import atexit
import gc
import os
import signal
import subprocess
import sys
import threading
import traceback
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from rolloutmq.cli import main

PYTHON = [sys.executable, "-m", "rolloutmq"]

OPEN_FILES = Path("/proc/self/fd")

_streams: list[Any] = []
"""Former streams, which would be flushed if they were forgotten."""

_inherited: set[str] = set()
"""Open files of every command."""

# it is the last that the process imports from which commands are forked
gc.freeze()


class ForkedProcess(subprocess.Popen[Any]):
    """Fork `python -m rolloutmq …` from this process, if it has one thread; start all else."""

    def __init__(self, args: Any, **options: Any) -> None:
        if list(args)[:3] == PYTHON and threading.active_count() == 1:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            environment = options.get("env") or dict(os.environ)
            options["preexec_fn"] = partial(_become_command, list(args)[3:], environment)
        super().__init__(args, **options)


def _become_command(words: list[str], environment: dict[str, str]) -> NoReturn:
    """Be a command in a process that was forked, in place of a start of Python."""
    for file in OPEN_FILES.iterdir():
        if file.name not in _inherited:
            _close(int(file.name))
    for number in (signal.SIGTERM, signal.SIGQUIT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.enable()
    os._exit(call_command(words, environment))


def _close(descriptor: int) -> None:
    # that of the list itself is closed
    with suppress(OSError):
        os.close(descriptor)


def run_command(log: Path, words: list[str], environment: dict[str, str]) -> NoReturn:
    """Be a command whose output is added to a file."""
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    os.close(output)
    # multiprocessing knows these, and would close what has their numbers then
    _inherited.update(file.name for file in OPEN_FILES.iterdir())
    os._exit(call_command(words, environment))


def call_command(words: list[str], environment: dict[str, str]) -> int:
    """Call a command as `python -m rolloutmq` does; return its exit code."""
    os.environ.clear()
    os.environ.update(environment)
    # what other processes see as its name
    name = " ".join([words[0], environment.get("RANK", "")]).strip()
    Path("/proc/self/comm").write_text(name, encoding="utf-8")
    sys.argv = ["rolloutmq", *words]
    # those of the process above could seek in their files, which a pipe refuses
    _streams.extend((sys.stdout, sys.stderr))
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    subprocess.Popen = ForkedProcess  # type: ignore[assignment,misc]
    code: object = 1
    try:
        main()
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code if isinstance(code, int) else int(code is not None)
