"""Copy a value at a border to a user's code, so that what this code changes is its own.

A loop, a judge, an agent, a tool or a `record` function may change all that it gets, at once or
later, on a thread that nobody waits for. What it gets is therefore never what a group is stored
from, what its siblings get, or what the next try gets.
"""

from __future__ import annotations

from copy import copy
from dataclasses import fields, is_dataclass
from types import NoneType
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from buffer.wire.rollout import RolloutState

T = TypeVar("T")

_IMMUTABLE = frozenset((str, int, float, bool, NoneType, bytes))


def own_copy(value: T) -> T:
    """Return a copy that shares no container and no array with `value`, at any depth.

    Containers are lists, dicts, sets, tuples, dataclasses and pydantic models. Other objects (an
    image, a tensor, a client) are the same in the copy: not all of them can be copied.
    """
    copied: T = _copied(value)
    return copied


def _copied(value: Any) -> Any:
    kind = type(value)
    if kind in _IMMUTABLE:
        return value
    if kind is dict:
        return {key: _copied(item) for key, item in value.items()}
    if kind is list:
        return [_copied(item) for item in value]
    return _copied_other(value)


def _copied_other(value: Any) -> Any:
    if isinstance(value, np.ndarray | bytearray):
        return value.copy()
    made: Any
    if isinstance(value, dict):  # of a class of its own; lists in the same way
        made = copy(value)
        made.update({key: _copied(item) for key, item in value.items()})
        return made
    if isinstance(value, list):
        made = copy(value)
        made[:] = [_copied(item) for item in value]
        return made
    if isinstance(value, set):
        return copy(value)
    if isinstance(value, tuple):
        items = [_copied(item) for item in value]
        return value._make(items) if hasattr(value, "_make") else tuple(items)
    if isinstance(value, BaseModel):
        return _with_own(value, vars(value))
    if is_dataclass(value) and not isinstance(value, type):
        return _with_own(value, [field.name for field in fields(value)])
    return value


def _with_own(value: Any, names: Any) -> Any:
    made = copy(value)
    for name in names:
        object.__setattr__(made, name, _copied(getattr(value, name)))
    return made


def own_rollout(state: RolloutState, **instead: Any) -> RolloutState:
    """Return a copy of a rollout as `own_copy` does, with the fields `instead`.

    Its routed experts, megabytes of a large model, are not copied but cannot be written.
    """
    made = state.model_copy()
    for name, value in vars(state).items():
        if name == "routed_experts" and isinstance(value, np.ndarray):
            made.__dict__[name] = read_only(value)
        else:
            made.__dict__[name] = instead[name] if name in instead else _copied(value)
    return made


def readers_copy(value: Any) -> Any:
    """Return a copy for code that only reads it: as `own_copy`, without routed experts.

    `value`: a rollout, a list of rollouts, or any other value.
    """
    if isinstance(value, RolloutState):
        return own_rollout(value.model_copy(update={"routed_experts": None}))
    if isinstance(value, list):
        return [readers_copy(item) for item in value]
    return own_copy(value)


def read_only(column: NDArray[Any]) -> NDArray[Any]:
    """Return a view that cannot be written."""
    view = column.view()
    view.flags.writeable = False
    return view
