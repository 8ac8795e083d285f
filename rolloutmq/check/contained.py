"""Run the units of a stage in a process of its own, which may hang, crash or exit.

    parent ──▶ python -m rolloutmq.check STAGE SKIP CONFIG OVERRIDES…        (stdout: JSON lines)
       ▲            {"begins": 3, "section": …, "what": …, "waits_s": …}    before a unit
       ├──────────  {"section": …, "level": …, "what": …}                   a finding
       └──────────  {"done": true}                                          the end

A unit that ends its process or exceeds its limit is an error; a new process runs the next units.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Generator, Iterator, Sequence
from contextlib import suppress
from typing import IO, Any

import orjson

from producer_workers.follow_owner import OWNER
from rolloutmq.check.finding import Finding

START_S = 120.0  # a process imports what its stage needs within this time
LIMIT_S = 120.0  # for one unit, beside the time that it expects to wait
EXIT_S = 5.0  # a finished process exits within this time: threads of user code may keep it
Line = dict[str, Any]


def run_stage(stage: str, command: Sequence[str]) -> Iterator[Finding]:
    """Yield the findings of a stage; `command`: the config's path and the overrides."""
    skip: int | None = 0
    while skip is not None:
        skip = yield from _run_from(skip, stage, command)


def _run_from(
    skip: int, stage: str, command: Sequence[str]
) -> Generator[Finding, None, int | None]:
    """Yield findings of the units from `skip` on; return where to continue, or None at the end."""
    start: Line = {"section": stage, "what": "its imports"}
    unit = start
    with tempfile.TemporaryFile() as errors, _start(stage, skip, command, errors) as process:
        try:
            while line := _next_line(process, _limit_s(unit)):
                if "done" in line:
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(EXIT_S)  # it removes its scratch files
                    return None
                if "begins" in line:
                    unit = line
                else:
                    yield Finding(**line)
            what = f"{unit['what']}: {_end(process, unit)}"
            yield Finding(unit["section"], "error", what, _last_line(errors))
        finally:
            _kill(process)
    return None if unit is start else unit["begins"] + 1


def _start(
    stage: str, skip: int, command: Sequence[str], errors: IO[bytes]
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "rolloutmq.check", stage, str(skip), *command],
        env=os.environ | {OWNER: str(os.getpid())},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=errors,
        start_new_session=True,
    )


def _limit_s(unit: Line) -> float:
    return LIMIT_S + unit["waits_s"] if "begins" in unit else START_S


def _next_line(process: subprocess.Popen[bytes], limit_s: float) -> Line | None:
    """Return the next line; None if the process ended, or was killed at its limit."""
    assert process.stdout is not None
    timer = threading.Timer(limit_s, _kill, [process])
    timer.daemon = True
    timer.start()
    try:
        line = process.stdout.readline()
    finally:
        timer.cancel()
    parsed: Line | None = orjson.loads(line) if line.endswith(b"\n") else None
    return parsed


def _end(process: subprocess.Popen[bytes], unit: Line) -> str:
    code = process.wait()
    if code == -signal.SIGKILL:
        return f"no end within {_limit_s(unit):g} s, or it was killed for its memory"
    how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return f"it ended the process that checked it ({how})"


def _kill(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _last_line(errors: IO[bytes]) -> str:
    errors.seek(0)
    lines = errors.read().decode(errors="replace").strip().splitlines()
    return f"it printed last: {lines[-1].strip():.200}" if lines else ""
