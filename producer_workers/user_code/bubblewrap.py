"""Build the command that runs a program with nothing but an interpreter around it, by bubblewrap.

The program sees its interpreter, packages and system libraries, read-only, and a limited /tmp. It
has namespaces of its own, no network, environment, /proc or capabilities, and no devices but null,
zero, random and urandom. `filter_program` refuses system calls.
"""

from __future__ import annotations

import errno
import functools
import platform
import shutil
import struct
import subprocess
import sys
import tempfile
from typing import IO, NamedTuple

from buffer.errors import SandboxUnavailable

_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
_PROGRAM = "/program.py"
_ROOT_BYTES = 1 << 20
_NOBODY = "65534"
_WEAK = 'or accept less protection with sandbox = "weak" (see SECURITY.md)'


def caged(program: IO[bytes], rules: IO[bytes], disk_mb: int) -> list[str]:
    """Return the command for `program` with the seccomp filter `rules`; it inherits both files."""
    readable = dict.fromkeys([*_LIBRARIES, sys.base_prefix, sys.prefix])
    return [
        *(shutil.which("bwrap") or "bwrap", "--unshare-all", "--unshare-user"),
        *("--die-with-parent", "--new-session", "--cap-drop", "ALL", "--clearenv"),
        *("--uid", _NOBODY, "--gid", _NOBODY, "--hostname", "sandbox", "--setenv", "HOME", "/tmp"),
        *("--size", str(_ROOT_BYTES), "--tmpfs", "/"),
        # before the interpreter, which may lie below /tmp
        *("--size", str(disk_mb << 20), "--tmpfs", "/tmp"),
        *(word for path in readable for word in ("--ro-bind-try", path, path)),
        *(word for path in _DEVICES for word in ("--dev-bind", path, path)),
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
        lines = tried.stderr.decode(errors="replace").strip().splitlines()
        reason = lines[-1] if lines else "no reason"
        hint = (
            "permit user namespaces (sysctl kernel.unprivileged_userns_clone=1; in a container a "
            f"seccomp profile that allows unshare and mount), {_WEAK}"
        )
        if "execvp" in reason or "error while loading" in reason:
            hint = (
                f"the interpreter {sys.executable} needs files outside of {sys.prefix}, "
                f"{sys.base_prefix} and the system's libraries: use a Python that is in one place, "
                f"{_WEAK}"
            )
        what = f"programs of a model run in bubblewrap, which fails here: {reason}"
        raise SandboxUnavailable(what, hint=hint)


class Processor(NamedTuple):
    """A processor's audit number, calls to refuse, and `clone`."""

    audit: int
    refused: tuple[int, ...]
    clone: int


# In this order: fork and vfork (not on aarch64), ptrace, unshare, setns, mount, umount2,
# pivot_root, chroot, bpf, perf_event_open, keyctl, add_key, request_key, userfaultfd,
# process_vm_readv, process_vm_writev, memfd_create, shmget, msgget, semget, mq_open, socket.
_X86_64 = (
    *(57, 58, 101, 272, 308, 165, 166, 155, 161, 321, 298, 250, 248, 249, 323, 310, 311, 319),
    *(29, 68, 64, 240, 41),
)
_AARCH64 = (
    *(117, 97, 268, 40, 39, 41, 51, 280, 241, 219, 217, 218, 282, 270, 271, 279),
    *(194, 186, 190, 180, 198),
)
# The same numbers everywhere: io_uring_setup, open_tree to fspick, mount_setattr, memfd_secret.
_NEWER = (425, 428, 429, 430, 431, 432, 433, 442, 447)

# By `platform.machine()`.
MACHINES = {
    "x86_64": Processor(0xC000003E, _X86_64 + _NEWER, clone=56),
    "aarch64": Processor(0xC00000B7, _AARCH64 + _NEWER, clone=220),
}

_CLONE3 = 435
_CLONE_THREAD = 0x10000
_X32 = 0x40000000

_LOAD, _EQUAL, _AT_LEAST, _HAS_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _AUDIT, _FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data
_ALLOW = 0x7FFF0000
_ERROR = 0x00050000
_KILL = 0x80000000


def filter_program(machine: str | None = None) -> bytes:
    """Return the filter as an array of struct sock_filter. Raises KeyError: see MACHINES."""
    audit, refused, clone = MACHINES[machine or platform.machine()]
    steps = [
        (_LOAD, 0, 0, _AUDIT),
        (_EQUAL, 1, 0, audit),  # a jump counts the instructions to skip: if true, if false
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        *_refuse(_AT_LEAST, _X32, errno.EPERM),
        *_refuse(_EQUAL, _CLONE3, errno.ENOSYS),
    ]
    for number in refused:
        steps += _refuse(_EQUAL, number, errno.EPERM)
    steps += [
        (_EQUAL, 0, 3, clone),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        (_HAS_BIT, 1, 0, _CLONE_THREAD),
        (_RETURN, 0, 0, _ERROR | errno.EPERM),
        (_RETURN, 0, 0, _ALLOW),
    ]
    return b"".join(struct.pack("=HBBI", *step) for step in steps)


def _refuse(test: int, value: int, error: int) -> list[tuple[int, int, int, int]]:
    return [(test, 0, 1, value), (_RETURN, 0, 0, _ERROR | error)]
