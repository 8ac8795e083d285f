"""Declare a function cheap, so that a worker calls it without a process of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

_MARK = "rolloutmq_cheap"


def cheap(function: F) -> F:
    """Declare a function of yours cheap: it answers in milliseconds, and never hangs.

    It may be a judge, a filter of groups, a tool, a factory of environments, an agent, a record
    function or a factory of data sets, an order, a curriculum or a should_continue_fn. It is called
    in a thread of the process that needs it, or in its event loop if it is a coroutine function,
    which must not block.

    Usage:
        @rolloutmq.cheap
        def score(response, ground_truth, state): ...
    """
    setattr(function, _MARK, True)
    return function


def is_cheap(function: Callable[..., Any]) -> bool:
    """Return whether a function was declared cheap."""
    return bool(getattr(function, _MARK, False))
