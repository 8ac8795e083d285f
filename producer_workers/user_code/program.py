"""The limits of a program that a model wrote, and how it ended."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one program. `time_s` limits both the wall clock and the CPU time.

    `memory_mb` is its address space, `file_mb` one file and what it prints, `files` those that are
    open at once, `disk_mb` all files together (bubblewrap only, in memory).
    """

    time_s: float = 10.0
    memory_mb: int = 1024
    file_mb: int = 16
    files: int = 64
    disk_mb: int = 64


DEFAULT_LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a program ended, and the first 64 KiB of its outputs.

    `exit_code` is negative, or above 128, for a signal. It is None where `problem` says which limit
    was reached.
    """

    exit_code: int | None
    stdout: str
    stderr: str
    problem: str = ""

    def describe(self) -> str:
        """Return what it printed, and what went wrong."""
        if self.problem:
            return f"{self.stdout}error: {self.problem}"
        if self.exit_code == 0:
            return self.stdout
        last = self.stderr.strip().splitlines()[-1:] or [f"exit code {self.exit_code}"]
        return f"{self.stdout}error: {last[0]}"
