"""Findings of the check, and its units: parts that may run user code and never return."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Literal

from buffer.errors import RolloutMQError
from producer_workers.hub import Repository
from rolloutmq.config.config import Config

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


@dataclass(frozen=True, slots=True)
class Finding:
    """What was checked and found, where, and the remedy ("" if none is needed)."""

    section: str
    level: Level
    what: str
    fix: str = ""
    text: str = ""  # a prompt, to be shown as it is
    tokens: float | None = None  # mean length of a task's prompts


def absent(section: str, repository: Repository | None) -> Finding:
    """Return the finding for a repository of the Hub whose files are not on this machine."""
    assert repository is not None
    return Finding(
        section,
        "warning",
        f"the {repository.kind} {repository.id} of the Hub is not on this machine, and is not "
        "checked",
        f"a run downloads it; to check it first, run `{repository.command}`",
    )


def failure(section: str, error: BaseException, what: str = "") -> Finding:
    """Return an error as a finding; `what`: the part of the config that was checked."""
    before = f"{what}: " if what else ""
    if isinstance(error, RolloutMQError):
        return Finding(section, "error", before + error.message, error.command_hint)
    return Finding(section, "error", f"{before}{type(error).__name__}: {error}")


# -- units ----------------------------------------------------------------------------------------

# modules beside this one; a process runs the `units(config)` of each
STAGES = ("functions", "model", "data")


@dataclass(frozen=True, slots=True)
class Unit:
    """A part of the check; `what` is the part of the config that it checks."""

    section: str
    what: str
    run: Callable[[], Iterator[Finding]]  # may raise anything
    waits_s: float = 0.0  # seconds that it may wait for user code that has a limit of its own


def findings_of(unit: Unit) -> Iterator[Finding]:
    try:
        yield from unit.run()
    except (Exception, SystemExit) as error:  # it runs code of the user, which may raise anything
        yield failure(unit.section, error, unit.what)


def units_of(stage: str, config: Config) -> list[Unit]:
    """Return the units of a stage, the same ones in every process."""
    # only here, because a stage imports what it needs
    made: list[Unit] = import_module(f"rolloutmq.check.{stage}").units(config)
    return made
