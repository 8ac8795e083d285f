"""Functions and classes of the user's that a config names."""

from __future__ import annotations

from functools import partial

from buffer.model.dotted_path import check_module
from producer_workers.user_functions import NamedFunction, named_functions
from rolloutmq.config.config import Config


def all_functions(config: Config) -> list[NamedFunction]:
    """Return everything of the user's that any process of the run imports, each name once."""
    found = named_functions(config)
    if loop := config.trainer.loop:
        load = partial(check_module, loop, kind="trainer loop")
        found.insert(0, NamedFunction(f"[trainer] loop = {loop}", load))
    return found
