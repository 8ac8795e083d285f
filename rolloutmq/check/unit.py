"""Define a unit: a part of the check that may run code of the user, and so may never return."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module

from rolloutmq.check.finding import Finding, failure
from rolloutmq.config.config import Config

STAGES = ("functions", "model", "data")
"""Modules beside this one; their `units(config)` run in a process for each."""


@dataclass(frozen=True, slots=True)
class Unit:
    """A part of the check; `what` is the part of the config that it checks."""

    section: str
    what: str
    run: Callable[[], Iterator[Finding]]
    """may raise anything"""
    waits_s: float = 0.0
    """seconds that it may wait for code of the user which has a limit of its own"""


def findings_of(unit: Unit) -> Iterator[Finding]:
    """Yield what a unit finds; what it raises is a finding, too."""
    try:
        yield from unit.run()
    except (Exception, SystemExit) as error:  # it runs code of the user, which may raise anything
        yield failure(unit.section, error, unit.what)


def units_of(stage: str, config: Config) -> list[Unit]:
    """Return the units of a stage, the same ones in every process."""
    # only here, because a stage imports what it needs
    made: list[Unit] = import_module(f"rolloutmq.check.{stage}").units(config)
    return made
