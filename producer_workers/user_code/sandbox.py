"""Run a Python program that a model wrote, in a sandbox.

bubblewrap: the program sees nothing but its interpreter; see `bubblewrap`.
weak: a process with limits, without a network if the kernel permits `unshare`; it reads and writes
what its user may, the environments of that user's processes too.
A URL: a service runs it; see `run_at`.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import os
import resource
import selectors
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ValidationError

from buffer.errors import AnswerTooLong, ConfigError, JudgeError, SandboxUnavailable
from buffer.imports import import_extra
from producer_workers.config.sandbox import BUBBLEWRAP, WEAK, is_url
from producer_workers.follow_owner import kill_session
from producer_workers.http_client import LONGEST_ANSWER, Service
from producer_workers.user_code.bubblewrap import caged, check_bubblewrap, file_of, rules_file

log = logging.getLogger("rolloutmq.worker")

_UNSHARE = ("unshare", "--user", "--map-root-user", "--net", "--pid", "--fork", "--kill-child")


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one program. `time_s` limits both the wall clock and the CPU time.

    `memory_mb`: address space. `file_mb`: one file, and the output, of which the first `output_kb`
    are kept. `files`: open at once.
    `disk_mb`: all files together (bubblewrap only, in memory).
    """

    time_s: float = 10.0
    memory_mb: int = 1024
    file_mb: int = 16
    files: int = 64
    disk_mb: int = 64
    output_kb: int = 64


DEFAULT_LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class ProgramResult:
    """How a program ended, and the beginning of its outputs.

    `exit_code`: negative, or above 128, for a signal; None if it reached the limit in `problem`.
    """

    exit_code: int | None
    stdout: str
    stderr: str
    problem: str = ""

    def describe(self) -> str:
        if self.problem:
            return f"{self.stdout}error: {self.problem}"
        if self.exit_code == 0:
            return self.stdout
        last = self.stderr.strip().splitlines()[-1:] or [f"exit code {self.exit_code}"]
        return f"{self.stdout}error: {last[0]}"


@dataclass(frozen=True, slots=True)
class _Start:
    command: Sequence[str]
    folder: str = "/"
    environment: dict[str, str] = field(default_factory=dict)
    files: Sequence[int] = ()  # descriptors that bubblewrap reads and closes


def check_sandbox(sandbox: str) -> None:
    """Raise SandboxUnavailable where programs cannot be run in `sandbox` on this machine."""
    if is_url(sandbox):
        import_extra("aiohttp", f"sandbox {sandbox}")
        return
    if sandbox not in (BUBBLEWRAP, WEAK):
        raise ConfigError(
            f"sandbox {sandbox!r:.80} is not known", hint=f"{BUBBLEWRAP}, {WEAK} or a URL"
        )
    if shutil.which("prlimit") is None:
        raise SandboxUnavailable(
            "programs of a model are limited by prlimit, which is not installed",
            hint="install util-linux, or set sandbox to a URL",
        )
    if sandbox == BUBBLEWRAP:
        check_bubblewrap()


@functools.cache
def isolation() -> tuple[str, ...]:
    """Return the command that takes a program's network away; () where the kernel forbids it."""
    if shutil.which("unshare"):
        tried = subprocess.run([*_UNSHARE, "true"], capture_output=True, check=False, timeout=30)
        if tried.returncode == 0:
            return _UNSHARE
    log.warning(
        "programs in the weak sandbox can use the network: this kernel forbids `unshare` without "
        "root"
    )
    return ()


def run_program(
    program: str, stdin: str = "", limits: Limits = DEFAULT_LIMITS, sandbox: str = BUBBLEWRAP
) -> ProgramResult:
    """Run a program; blocks for little more than `limits.time_s`, or longer for a slow service.

    Raises SandboxUnavailable, and JudgeError where a service fails.
    """
    if is_url(sandbox):
        return asyncio.run(run_at(sandbox, program, stdin, limits))
    check_sandbox(sandbox)
    start = _start_weakly if sandbox == WEAK else _start_caged
    with file_of(stdin.encode()) as given, start(program, limits) as how:
        outputs = [bytearray(), bytearray()]
        with subprocess.Popen(
            [*_limited(limits), *how.command],
            cwd=how.folder,
            env=how.environment,
            pass_fds=how.files,
            start_new_session=True,
            stdin=given,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        ) as process:
            try:
                problem = _read(process, outputs, time.monotonic() + limits.time_s, limits)
            finally:
                kill_session(process.pid)  # with its children
    stdout, stderr = (bytes(output).decode(errors="replace") for output in outputs)
    return ProgramResult(None if problem else process.returncode, stdout, stderr, problem)


@contextmanager
def _start_caged(program: str, limits: Limits) -> Iterator[_Start]:
    with file_of(program.encode()) as text, rules_file() as rules:
        command = caged(text, rules, limits.disk_mb)
        yield _Start(command, files=(text.fileno(), rules.fileno()))


@contextmanager
def _start_weakly(program: str, limits: Limits) -> Iterator[_Start]:
    with tempfile.TemporaryDirectory(prefix="rolloutmq-") as folder:
        Path(folder, "program.py").write_text(program, encoding="utf-8")
        environment = {"PATH": os.environ.get("PATH", ""), "HOME": folder}
        # -I: neither the user's packages nor the environment may change the program.
        command = [*isolation(), sys.executable, "-I", "program.py"]
        yield _Start(command, folder, environment)


def _limited(limits: Limits) -> list[str]:
    """Return the command that lowers the limits of what follows it, children included."""
    asked = {
        "cpu": (resource.RLIMIT_CPU, math.ceil(limits.time_s)),
        "as": (resource.RLIMIT_AS, limits.memory_mb << 20),
        "fsize": (resource.RLIMIT_FSIZE, limits.file_mb << 20),
        "nofile": (resource.RLIMIT_NOFILE, limits.files),
        "core": (resource.RLIMIT_CORE, 0),
    }
    command = [shutil.which("prlimit") or "prlimit"]
    for name, (limit, value) in asked.items():
        _, hard = resource.getrlimit(limit)
        command.append(f"--{name}={value if hard == resource.RLIM_INFINITY else min(value, hard)}")
    return [*command, "--"]


def _read(
    process: subprocess.Popen[bytes], outputs: list[bytearray], deadline: float, limits: Limits
) -> str:
    """Keep the beginning of each output; return which limit was reached, or ""."""
    sizes = [0, 0]
    with selectors.DefaultSelector() as open_streams:
        for number, stream in enumerate((process.stdout, process.stderr)):
            assert stream is not None
            open_streams.register(stream, selectors.EVENT_READ, number)
        while open_streams.get_map():
            for key, _ in open_streams.select(max(0.0, deadline - time.monotonic())):
                chunk = os.read(key.fd, 64 * 1024)
                kept = outputs[key.data]
                kept += chunk[: (limits.output_kb << 10) - len(kept)]
                sizes[key.data] += len(chunk)
                if not chunk:
                    open_streams.unregister(key.fileobj)
            if max(sizes) > limits.file_mb << 20:
                return f"it wrote more than {limits.file_mb} MiB"
            if time.monotonic() >= deadline:
                return "the time limit was reached"
    try:
        process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return "the time limit was reached"
    return ""


RETRIES = 3  # further attempts where a service does not answer


class _Result(BaseModel):
    status: Literal["Finished", "Error", "TimeLimitExceeded"]
    return_code: int | None = None
    stdout: str | None = None
    stderr: str | None = None


class _Answer(BaseModel):
    status: Literal["Success", "Failed", "SandboxError"]
    message: str = ""
    run_result: _Result | None = None


async def run_at(url: str, program: str, stdin: str, limits: Limits) -> ProgramResult:
    """Return how a program ended. Raises JudgeError where the service fails."""
    what = f"sandbox {url}"
    hint = "check the service"
    address = url.rstrip("/").removesuffix("/run_code") + "/run_code"
    # 30 s for the queue of the service
    service = Service(what, address, limits.time_s + 30.0, RETRIES, hint)
    question = {
        "code": program,
        "language": "python",
        "stdin": stdin,
        "run_timeout": limits.time_s,
        "memory_limit_MB": limits.memory_mb,
    }
    try:
        given = await service.ask(question)
    except AnswerTooLong:  # only what the program printed makes an answer that long
        return ProgramResult(None, "", "", f"it wrote more than {LONGEST_ANSWER >> 20} MiB")
    try:
        answer = _Answer.model_validate(given)
    except ValidationError as error:
        raise JudgeError(f"{what} answered {given!r:.200}", hint="see external_sandbox") from error
    result = answer.run_result
    if result is None or answer.status == "SandboxError" or result.status == "Error":
        raise JudgeError(f"{what} failed: {answer.message[:200] or answer.status}", hint=hint)
    if result.status == "TimeLimitExceeded":
        late = "the time limit was reached"
        return ProgramResult(None, result.stdout or "", result.stderr or "", late)
    return ProgramResult(result.return_code or 0, result.stdout or "", result.stderr or "")
