"""Import every function and class that a config names."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from buffer.imports import check_module
from producer_workers.user_functions import NamedFunction, named_functions
from rolloutmq.check.finding import Finding, Unit
from rolloutmq.config.config import Config


def units(config: Config) -> list[Unit]:
    found = all_functions(config)
    return [Unit("functions", each.key, partial(_import, each)) for each in found]


def _import(function: NamedFunction) -> Iterator[Finding]:
    function.load()
    yield Finding("functions", "ok", function.key)


def all_functions(config: Config) -> list[NamedFunction]:
    """Return all user functions and classes that any process of the run imports, each once."""
    found = named_functions(config)
    if loop := config.trainer.loop:
        load = partial(check_module, loop, kind="trainer loop")
        found.insert(0, NamedFunction(f"[trainer] loop = {loop}", load))
    return found
