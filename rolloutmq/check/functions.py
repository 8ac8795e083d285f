"""Import every function and class that a config names."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from producer_workers.user_functions import NamedFunction
from rolloutmq.check.finding import Finding
from rolloutmq.check.unit import Unit
from rolloutmq.config.config import Config
from rolloutmq.config.functions import all_functions


def units(config: Config) -> list[Unit]:
    """Return a unit per function."""
    found = all_functions(config)
    return [Unit("functions", each.key, partial(_import, each)) for each in found]


def _import(function: NamedFunction) -> Iterator[Finding]:
    function.load()
    yield Finding("functions", "ok", function.key)
