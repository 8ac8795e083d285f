"""Build the seccomp filter of a caged program: one process, without sockets, that loads nothing.

A program may start threads, not processes: so its limit of address space is the limit of all that
it uses, and nothing can be left behind. What is refused fails with EPERM, and `clone3` with ENOSYS,
because the C library then calls `clone`, whose flags a filter can read.
"""

from __future__ import annotations

import errno
import platform
import struct
from typing import NamedTuple


class Machine(NamedTuple):
    """What a filter must know of a processor: audit number, calls to refuse, `clone`."""

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

MACHINES = {
    "x86_64": Machine(0xC000003E, _X86_64 + _NEWER, clone=56),
    "aarch64": Machine(0xC00000B7, _AARCH64 + _NEWER, clone=220),
}
"""The processors that a filter is known for, by `platform.machine()`."""

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
