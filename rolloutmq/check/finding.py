"""Define a finding of the check, and the sections of its report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from buffer.errors import RolloutMQError
from producer_workers.hub import Repository

Level = Literal["ok", "warning", "error"]

SECTIONS = (
    "config",
    "machine",
    "functions",
    "model",
    "data",
    "judge",
    "memory",
    "time",
)
"""Sections of the report, in its order."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What was checked and found, where, and what to do about it ("" where nothing is)."""

    section: str
    level: Level
    what: str
    fix: str = ""
    text: str = ""
    """a prompt, to be shown as it is"""
    tokens: float | None = None
    """mean length of a task's prompts"""


def absent(section: str, repository: Repository | None) -> Finding:
    """Return the finding of a repository of the Hub whose files are not on this machine."""
    assert repository is not None
    return Finding(
        section,
        "warning",
        f"the {repository.kind} {repository.id} of the Hub is not on this machine, and is not "
        "checked",
        f"a run downloads it; to check it first, run `{repository.command}`",
    )


def failure(section: str, error: BaseException, what: str = "") -> Finding:
    """Return the finding of an error; `what`: the part of the config that was checked."""
    before = f"{what}: " if what else ""
    if isinstance(error, RolloutMQError):
        return Finding(section, "error", before + error.message, error.command_hint)
    return Finding(section, "error", f"{before}{type(error).__name__}: {error}")
