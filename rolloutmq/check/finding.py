"""Findings of the check, and the parts of it that may run user code and never return."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

from buffer.errors import RolloutMQError
from buffer.imports import missing_extra
from producer_workers.hub import Repository

Level = Literal["ok", "warning", "error"]

SECTIONS = ("config", "machine", "functions", "model", "data", "judge", "memory")


@dataclass(frozen=True, slots=True)
class Finding:
    """What was checked and found, where, and the remedy ("" if none is needed)."""

    section: str
    level: Level
    what: str
    fix: str = ""
    text: str = ""  # a prompt, to be shown as it is
    exit_code: int = 1  # of a run that ends with this error

    def error(self) -> RolloutMQError:
        made = RolloutMQError(self.what, hint=self.fix)
        made.exit_code = self.exit_code
        return made


def findings_of(section: str) -> list[Callable[..., Finding]]:
    """Return what makes a finding of a section that is right, a warning, or an error."""
    return [partial(Finding, section, level) for level in ("ok", "warning", "error")]


@dataclass(frozen=True, slots=True)
class Unit:
    """A part of the check; `what` is the part of the config that it checks."""

    section: str
    what: str
    run: Callable[[], Iterator[Finding]]  # may raise anything
    waits_s: float = 0.0  # further seconds that it may take

    def findings(self) -> Iterator[Finding]:
        try:
            yield from self.run()
        except (Exception, SystemExit) as error:  # code of the user may raise anything
            yield failure(self.section, error, self.what)


def absent(section: str, repository: Repository | None) -> Finding:
    """Return the finding for a repository of the Hub whose files are not on this machine."""
    assert repository is not None
    what = f"the {repository.kind} {repository.id} of the Hub is not on this machine: not checked"
    fix = f"a run downloads it; to check it first, run `{repository.command}`"
    return Finding(section, "warning", what, fix)


def failure(section: str, error: BaseException, what: str = "") -> Finding:
    """Return an error as a finding; `what`: the part of the config that was checked."""
    before = f"{what}: " if what else ""
    if isinstance(error, ImportError):
        error = missing_extra(error) or error
    if isinstance(error, RolloutMQError):
        text, hint, code = before + error.message, error.command_hint, error.exit_code
        return Finding(section, "error", text, hint, exit_code=code)
    return Finding(section, "error", f"{before}{type(error).__name__}: {error}")
