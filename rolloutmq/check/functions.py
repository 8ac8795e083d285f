"""Import every function and class that a config names."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from buffer.imports import check_module, is_dotted_path, load_function
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
    of_the_loss = {
        "[learner.loss] objective": config.learner.loss.objective,
        "[trainer] advantages": config.trainer.advantages,
    }
    for key, spec in of_the_loss.items():
        if is_dotted_path(spec):
            load = partial(load_function, spec, kind=key)
            found.append(NamedFunction(f"{key} = {spec}", load))
    return found
