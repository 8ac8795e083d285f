"""What only the launcher of a run knows of its processes: how each of them ended, and why.

    processes.jsonl    a line for each process that `rolloutmq run` started, and for each end that
                       it did not order itself

Only the launcher writes, by appending. Lines that a full disk refuses wait in its memory until
there is room; the end that ends a run is in the run's `LaunchRecord`, too, which needs none. Views
read both (`views/explain/processes.py`). A run whose processes were started one by one has neither.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import time
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple

import psutil
from pydantic import BaseModel, ValidationError

from buffer.errors import RolloutMQError
from buffer.readable import format_size
from buffer.redis.server.embedded import FULL_BYTES

PROCESSES_FILE = "processes.jsonl"
SAMPLES = 20  # ten seconds: a process of many GiB ends that long after it was killed
BY_OTHERS = frozenset({signal.SIGHUP, signal.SIGINT, signal.SIGKILL, signal.SIGTERM})

Kind = Literal[
    "disk/full", "process/out_of_memory", "process/killed", "process/failed", "process/stopped"
]


class ProcessStart(BaseModel):
    """A process that was started. `at_s`: seconds since 1970; `rank`: of several of one name."""

    name: str
    rank: int = 0
    pid: int = 0
    at_s: float = 0.0


class ProcessEnd(ProcessStart):
    """How a process ended that the run did not end itself. Sizes are in bytes, 0 if unknown.

    `code`: its exit code; negative: the signal that killed it. `cause`: the error in its log.
    `fruitless`: lives in a row that achieved nothing, with this one (`launch/child.py`).
    `is_final`: it ended the run. `memory`: its own, as seen last; `free`, `total`: of the machine,
    or of the container, then. `disk_free`: on the disk of the run's folder. `oom_kills`: processes
    that the kernel killed for lack of memory in the seconds before.
    """

    code: int
    lived_s: float = 0.0
    cause: str = ""
    fruitless: int = 0
    is_final: bool = False
    memory: int = 0
    free: int = 0
    total: int = 0
    disk_free: int = FULL_BYTES
    oom_kills: int = 0

    @property
    def kind(self) -> Kind:
        """Return the stable name of the finding about it."""
        if self.oom_kills and self.code == -signal.SIGKILL:
            return "process/out_of_memory"
        if self.disk_free < FULL_BYTES or os.strerror(errno.ENOSPC) in self.cause:
            return "disk/full"
        if -self.code in BY_OTHERS:
            return "process/killed"
        return "process/failed" if self.code not in (0, 130) else "process/stopped"

    @property
    def how(self) -> str:
        if self.code < 0:
            return f"was killed by {signal.Signals(-self.code).name}"
        return f"ended with exit code {self.code}"

    @property
    def why(self) -> str:
        """Return the reason in one line; for a kill from outside, not the last line of its log."""
        if self.kind == "process/out_of_memory":
            limit = ", perhaps at the limit of a container" if self.free > self.total // 5 else ""
            return f"the kernel killed it for lack of memory{limit}{self._memory}"
        if -self.code in BY_OTHERS:
            return f"by whom is unknown{self._memory}"
        if self.oom_kills:  # of a child, or of a stranger
            return f"{self.cause}; before, the kernel killed a process for lack of memory"
        return self.cause

    @property
    def _memory(self) -> str:
        if not self.total:
            return ""
        own = f"its memory was {format_size(self.memory)}, " if self.memory else ""
        return f"; {own}{format_size(self.free)} of {format_size(self.total)} were free"


class ProcessFailed(RolloutMQError):
    """Raised when a process of the run ended for good; the message has its error."""

    def __init__(self, message: str, end: ProcessEnd, *, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.end = end
        self.exit_code = end.code if end.code > 0 else 1


class _Sample(NamedTuple):
    memory: dict[int, int]  # by pid
    free: int
    total: int
    disk_free: int
    oom_kills: int


class ProcessJournal:
    """Writes `processes.jsonl` of one run's folder, and remembers what was seen of memory."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._waiting: list[bytes] = []  # lines that are not written yet
        self._samples: deque[_Sample] = deque(maxlen=SAMPLES)

    def sample(self, pids: Iterable[int]) -> None:
        """Note the memory of the processes and of the machine; called at each poll."""
        memory = {}
        for pid in pids:
            with suppress(psutil.Error):  # it ended just now
                memory[pid] = psutil.Process(pid).memory_info().rss
        memory = {pid: size for pid, size in memory.items() if size}  # a zombie has none
        self._samples.append(_Sample(memory, *_memory(), _disk_free(self._folder), _oom_kills()))

    def started(self, name: str, rank: int, pid: int) -> None:
        self._write(ProcessStart(name=name, rank=rank, pid=pid, at_s=time.time()))

    def end_of(self, name: str, rank: int, pid: int, code: int) -> ProcessEnd:
        """Return the end of a process with what was sampled before it."""
        if not self._samples:
            self.sample(())
        before = self._samples[-1]
        memory = next(
            (each.memory[pid] for each in reversed(self._samples) if pid in each.memory), 0
        )
        return ProcessEnd(
            name=name, rank=rank, pid=pid, at_s=time.time(), code=code,
            memory=memory, free=before.free, total=before.total,
            disk_free=min(before.disk_free, _disk_free(self._folder)),
            oom_kills=_oom_kills() - self._samples[0].oom_kills,
        )  # fmt: skip

    def full_disk(self, end: ProcessEnd) -> str:
        """Return a sentence if a full disk was the cause, else ""."""
        is_full = end.disk_free < FULL_BYTES
        return f"the disk of {self._folder} is full; free some space" if is_full else ""

    def ended(self, end: ProcessEnd) -> None:
        self._write(end)

    def _write(self, line: ProcessStart) -> None:
        self._waiting.append(line.model_dump_json(exclude_defaults=True).encode() + b"\n")
        data = b"".join(self._waiting)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        try:
            file = os.open(self._folder / PROCESSES_FILE, flags, 0o666)
            try:
                is_whole = os.write(file, data) == len(data)
            finally:
                os.close(file)
        except OSError:  # the disk is full, or the folder is gone
            return
        # behind a part of a line, readers find the whole one again
        self._waiting = [] if is_whole else [b"\n", *self._waiting]


def read_processes(folder: Path, since_s: float = 0.0) -> list[ProcessStart | ProcessEnd]:
    """Return the starts and ends since a time, oldest first; [] without a launcher's file."""
    file = folder / PROCESSES_FILE
    lines = file.read_bytes().splitlines() if file.is_file() else []
    found: list[ProcessStart | ProcessEnd] = []
    for line in lines:
        with suppress(ValidationError):  # torn by a full disk, or still being written
            kind = ProcessEnd if b'"code":' in line else ProcessStart
            found.append(kind.model_validate_json(line))
    return [each for each in found if each.at_s >= since_s]


def _disk_free(folder: Path) -> int:
    """Return the free bytes; those of a disk with room if the folder is gone."""
    with suppress(OSError):
        return shutil.disk_usage(folder).free
    return FULL_BYTES


def _memory() -> tuple[int, int]:
    """Return what is free of how much, in bytes: of this machine, or of a container's cgroup."""
    machine = psutil.virtual_memory()
    with suppress(OSError, ValueError, IndexError):  # "max", or no cgroup of version 2
        own = Path("/proc/self/cgroup").read_text(encoding="ascii").split("0::/")[1].strip()
        group = Path("/sys/fs/cgroup", own)
        total = int((group / "memory.max").read_text(encoding="ascii"))
        counts = (group / "memory.stat").read_text(encoding="ascii").split()
        cache = int(counts[counts.index("inactive_file") + 1])
        free = total - int((group / "memory.current").read_text(encoding="ascii")) + cache
        return min(free, machine.available), min(total, machine.total)
    return machine.available, machine.total


def _oom_kills() -> int:
    """Return how many processes the kernel has killed for lack of memory, in all containers."""
    with suppress(OSError, ValueError, IndexError):  # macOS, or a sandbox
        counts = Path("/proc/vmstat").read_text(encoding="ascii").split()
        return int(counts[counts.index("oom_kill") + 1])
    return 0
