"""Build the command that runs a program with nothing but an interpreter around it, by bubblewrap.

The program sees its interpreter with its packages and the system's libraries, read-only, and a /tmp
of its own of limited size. It has no network, no environment, no /proc, no devices but null, zero,
random and urandom, no capabilities, and namespaces of its own. See `syscall_filter` for the rest.
"""

from __future__ import annotations

import functools
import platform
import shutil
import subprocess
import sys
import tempfile
from typing import IO

from buffer.errors import SandboxUnavailable
from producer_workers.user_code.syscall_filter import MACHINES, filter_program

_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
_PROGRAM = "/program.py"
_ROOT_BYTES = 1 << 20
_NOBODY = "65534"
_WEAK = 'or accept less protection with sandbox = "weak" (see SECURITY.md)'


def caged(program: IO[bytes], rules: IO[bytes], disk_mb: int) -> list[str]:
    """Return the command for `program` with the seccomp filter `rules`; it inherits both files."""
    return [
        *_command(),
        *("--size", str(_ROOT_BYTES), "--tmpfs", "/"),
        # before the interpreter, which may lie below /tmp
        *("--size", str(disk_mb << 20), "--tmpfs", "/tmp"),
        *_binds(),
        *("--dir", "/dev", "--symlink", "/tmp", "/dev/shm"),
        *("--ro-bind-data", str(program.fileno()), _PROGRAM),
        *("--remount-ro", "/", "--chdir", "/tmp"),
        *("--seccomp", str(rules.fileno())),
        *("--", sys.executable, "-I", _PROGRAM),
    ]


def rules_file() -> IO[bytes]:
    """Return the seccomp filter as a file that bubblewrap can read from its start."""
    return file_of(filter_program())


def file_of(content: bytes) -> IO[bytes]:
    """Return an unnamed file with `content`, at its start."""
    file = tempfile.TemporaryFile()  # noqa: SIM115 (the caller closes it)
    file.write(content)
    file.seek(0)
    return file


@functools.cache
def check_bubblewrap() -> None:
    """Run an empty program once. Raises SandboxUnavailable where that fails."""
    if shutil.which("bwrap") is None:
        raise SandboxUnavailable(
            "programs of a model run in bubblewrap, which is not installed",
            hint=f"apt-get install bubblewrap, {_WEAK}",
        )
    if platform.machine() not in MACHINES:
        raise SandboxUnavailable(
            f"programs of a model cannot be caged on {platform.machine()}",
            hint=f"use {' or '.join(MACHINES)}, a sandbox by URL, {_WEAK}",
        )
    with file_of(b"") as program, rules_file() as rules:
        tried = subprocess.run(
            caged(program, rules, disk_mb=1),
            env={},
            pass_fds=(program.fileno(), rules.fileno()),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            timeout=30,
        )
    if tried.returncode:
        reason = tried.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["no reason"]
        raise SandboxUnavailable(
            f"programs of a model run in bubblewrap, which fails here: {reason[0]}",
            hint=_hint(reason[0]),
        )


def _hint(reason: str) -> str:
    """Return what to do about the last line of bubblewrap's output."""
    if "execvp" in reason or "error while loading" in reason:
        return (
            f"the interpreter {sys.executable} needs files outside of {sys.prefix}, "
            f"{sys.base_prefix} and the system's libraries: use a Python that is in one place, "
            f"{_WEAK}"
        )
    return (
        "permit user namespaces (sysctl kernel.unprivileged_userns_clone=1; in a container a "
        f"seccomp profile that allows unshare and mount), {_WEAK}"
    )


def _command() -> tuple[str, ...]:
    return (
        *(shutil.which("bwrap") or "bwrap", "--unshare-all", "--unshare-user"),
        *("--die-with-parent", "--new-session", "--cap-drop", "ALL", "--clearenv"),
        *("--uid", _NOBODY, "--gid", _NOBODY, "--hostname", "sandbox", "--setenv", "HOME", "/tmp"),
    )


@functools.cache
def _binds() -> tuple[str, ...]:
    interpreter = dict.fromkeys([*_LIBRARIES, sys.base_prefix, sys.prefix])
    folders = [word for path in interpreter for word in ("--ro-bind-try", path, path)]
    devices = [word for path in _DEVICES for word in ("--dev-bind", path, path)]
    return (*folders, *devices)
