"""Mark a function that a worker calls in its own process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

_MARK = "rolloutmq_runs_inline"


def runs_inline(function: F) -> F:
    """Mark a function of yours that answers in milliseconds and never hangs.

    It may be a judge, a filter of groups, a tool, a factory of environments, an agent, a record
    function or a factory of data sets, an order, a curriculum or a should_continue_fn. It is called
    in a thread of the process that needs it, or in its event loop if it is a coroutine function,
    which must not block.
    """
    setattr(function, _MARK, True)
    return function


def is_marked_inline(function: Callable[..., Any]) -> bool:
    """Return whether a function has the mark of `runs_inline`."""
    return bool(getattr(function, _MARK, False))
