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
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from rolloutmq.check.contained import serve
from rolloutmq.cli import main

MAINS = {"rolloutmq": main, "rolloutmq.check": serve}

OPEN_FILES = Path("/proc/self/fd")

_streams: list[Any] = []
"""Streams of the parent, kept since Python flushes a stream that it frees."""

_inherited: set[str] = set()
"""Descriptors that stay open in each command."""

# this module is the last that the forkserver imports
gc.freeze()


class ForkedProcess(subprocess.Popen[Any]):
    """Fork `python -m` of MAINS from this process, if it has one thread; start all else."""

    def __init__(self, args: Any, **options: Any) -> None:
        python, *words = args
        is_ours = python == sys.executable and words[:1] == ["-m"] and words[1] in MAINS
        if is_ours and threading.active_count() == 1:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            environment = options.get("env") or dict(os.environ)
            options["preexec_fn"] = partial(_run_here, words[1:], environment)
            # Python ignores SIGPIPE from its start on; Popen would undo that in the forked one
            options["restore_signals"] = False
        super().__init__(args, **options)


def _run_here(words: list[str], environment: dict[str, str]) -> NoReturn:
    """Run the main function of a module in this forked process, in place of a new Python."""
    for file in OPEN_FILES.iterdir():
        if file.name not in _inherited:
            _close(int(file.name))
    for number in (signal.SIGTERM, signal.SIGQUIT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.enable()
    module, *arguments = words
    os._exit(call_command(arguments, environment, MAINS[module]))


def _close(descriptor: int) -> None:
    # the descriptor of the listing itself is closed by now
    with suppress(OSError):
        os.close(descriptor)


def run_command(log: Path, words: list[str], environment: dict[str, str]) -> NoReturn:
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    os.close(output)
    fork_commands()
    os._exit(call_command(words, environment))


def fork_commands() -> None:
    """Fork each `python -m rolloutmq …` that this process starts from now on."""
    # multiprocessing closes these numbers later, so nothing else may get one of them
    _inherited.update(file.name for file in OPEN_FILES.iterdir())
    subprocess.Popen = ForkedProcess  # type: ignore[assignment,misc]


def call_command(
    words: list[str], environment: dict[str, str], start: Callable[[], None] = main
) -> int:
    """Call a command as `python -m rolloutmq` does; return its exit code."""
    os.environ.clear()
    os.environ.update(environment)
    # tests find the process by this name
    name = " ".join([words[0], environment.get("RANK", "")]).strip()
    Path("/proc/self/comm").write_text(name, encoding="utf-8")
    sys.argv = ["rolloutmq", *words]
    # the parent's streams seek in their files, and the new files may be pipes
    _streams.extend((sys.stdout, sys.stderr))
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    code: object = 1
    try:
        start()
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code if isinstance(code, int) else int(code is not None)
