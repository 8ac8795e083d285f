"""Run a Python program that a model wrote, in a process with limits.

The kernel limits CPU time, address space, size and number of files; a wall clock ends the rest.
Where the kernel permits it (`unshare`, without root), the process has no network and takes its
children with it when it ends. It still reads and writes what its user may: run it in a container if
the model may be malicious.
"""

from __future__ import annotations

import functools
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

log = logging.getLogger("rolloutmq.worker")

_LIMITER = str(Path(__file__).with_name("sandbox_limiter.py"))
_UNSHARE = ("unshare", "--user", "--map-root-user", "--net", "--pid", "--fork", "--kill-child")

LONGEST_OUTPUT = 64 * 1024
"""Bytes of stdout and of stderr that are kept; the program may write `file_mb`."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one program. `time_s` limits both the wall clock and the CPU time."""

    time_s: float = 10.0
    memory_mb: int = 1024
    file_mb: int = 16
    files: int = 64


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a program ended. `exit_code` is negative for a signal; None after the time limit."""

    exit_code: int | None
    stdout: str
    stderr: str

    def describe(self) -> str:
        """Return what it printed, and what went wrong."""
        if self.exit_code is None:
            return f"{self.stdout}error: the time limit was reached"
        if self.exit_code == 0:
            return self.stdout
        last = self.stderr.strip().splitlines()[-1:] or [f"exit code {self.exit_code}"]
        return f"{self.stdout}error: {last[0]}"


@functools.cache
def isolation() -> tuple[str, ...]:
    """Return the command that takes a program's network away; () where the kernel forbids it."""
    if shutil.which("unshare"):
        tried = subprocess.run([*_UNSHARE, "true"], capture_output=True, check=False, timeout=30)
        if tried.returncode == 0:
            return _UNSHARE
    log.warning(
        "programs in the sandbox can use the network: this kernel forbids `unshare` without root"
    )
    return ()


def run_python(program: str, stdin: str = "", limits: Limits = Limits()) -> Outcome:
    """Run a program in a folder of its own, which is removed.

    Blocks for little more than `limits.time_s`.
    """
    with tempfile.TemporaryDirectory(prefix="rolloutmq-") as folder:
        Path(folder, "program.py").write_text(program, encoding="utf-8")
        out = Path(folder, ".stdout")
        err = Path(folder, ".stderr")
        with out.open("wb") as stdout, err.open("wb") as stderr:
            process = subprocess.Popen(
                [*isolation(), sys.executable, "-I", _LIMITER, *_words(limits), "program.py"],
                cwd=folder,
                env={"PATH": os.environ.get("PATH", ""), "HOME": folder},
                start_new_session=True,
                stdin=subprocess.PIPE,
                stdout=stdout,
                stderr=stderr,
            )
            exit_code = _wait(process, stdin, limits.time_s)
        return Outcome(exit_code, _head(out), _head(err))


def _words(limits: Limits) -> list[str]:
    return [str(limits.time_s), str(limits.memory_mb), str(limits.file_mb), str(limits.files)]


def _wait(process: subprocess.Popen[bytes], stdin: str, time_s: float) -> int | None:
    try:
        process.communicate(stdin.encode(), timeout=time_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        # End the processes that it started, too.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return process.returncode


def _head(file: Path) -> str:
    with file.open("rb") as stream:
        return stream.read(LONGEST_OUTPUT).decode(errors="replace")
