"""Copy a value for a user's code, so that its changes, even later on a thread, stay its own.

What it gets is never what a group is stored from, or what its siblings or the next try get.
"""

from __future__ import annotations

from copy import copy
from dataclasses import fields, is_dataclass
from types import NoneType
from typing import Any, TypeVar

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from pydantic import BaseModel

from buffer.wire.column import read_only
from buffer.wire.columns import COLUMNS, column_named
from buffer.wire.rollout import RolloutState, Status
from buffer.wire.sampling_mask import SamplingMask

T = TypeVar("T")

_IMMUTABLE = frozenset((str, int, float, bool, NoneType, bytes, Status))
_COPIED = (np.ndarray, bytearray, set, dict, list, BaseModel)


def own_copy(value: T) -> T:
    """Return a copy that shares no container and no array with `value`, at any depth.

    Containers are lists, dicts, sets, tuples, structs, dataclasses and pydantic models. Other
    objects (an image, a tensor, a client) stay the same, since not all of them can be copied.
    """
    given: Any = value
    kind = type(given)
    made: Any
    if kind in _IMMUTABLE:
        return value
    if kind is list:
        made = [item if type(item) in _IMMUTABLE else own_copy(item) for item in given]
    elif kind is dict:
        made = {
            key: item if type(item) in _IMMUTABLE else own_copy(item) for key, item in given.items()
        }
    elif kind is np.ndarray:
        made = given.copy("K")
    elif isinstance(given, tuple):
        if _IMMUTABLE.issuperset(map(type, given)):
            return value
        items = [own_copy(item) for item in given]
        made = given._make(items) if hasattr(given, "_make") else tuple(items)
    elif isinstance(given, Struct):
        held = {name: getattr(given, name) for name in given.__struct_fields__}
        own = {name: own_copy(item) for name, item in held.items() if type(item) not in _IMMUTABLE}
        made = replace(given, **own)
    else:
        made = _own_object(given)
    return made  # type: ignore[no-any-return]


def _own_object(given: Any) -> Any:
    is_record = is_dataclass(given) and not isinstance(given, type)
    if not is_record and not isinstance(given, _COPIED):
        return given
    made = copy(given)
    if isinstance(given, dict):  # of a class of its own; lists in the same way
        made.update({key: own_copy(item) for key, item in given.items()})
    elif isinstance(given, list):
        made[:] = [own_copy(item) for item in given]
    elif is_record or isinstance(given, BaseModel):
        names = [field.name for field in fields(given)] if is_record else vars(given)
        for name in names:
            object.__setattr__(made, name, own_copy(getattr(given, name)))
    return made


def own_rollout(state: RolloutState, **instead: Any) -> RolloutState:
    """Return a copy of a rollout with the fields `instead`; the largest become read-only."""
    made = state.model_copy()
    into = made.__dict__
    for name, value in into.items():
        if type(value) in _IMMUTABLE or name in instead:
            continue
        if name == "columns":
            into[name] = {key: _own_column(key, own) for key, own in value.items()}
        else:
            into[name] = _own_column(name, value) if name in COLUMNS else own_copy(value)
    into.update(instead)
    return made


def _own_column(name: str, value: Any) -> Any:
    column = column_named(name)
    if column is None or not column.is_large:
        return own_copy(value)
    if isinstance(value, SamplingMask):
        return SamplingMask(read_only(value.counts), read_only(value.ids))
    return read_only(value) if isinstance(value, np.ndarray) else value


def readers_copy(value: Any) -> Any:
    """Return an `own_copy` of a rollout, a list of them, or a value, without large columns."""
    if isinstance(value, RolloutState):
        return own_rollout(value.slim())
    if isinstance(value, list):
        return [readers_copy(item) for item in value]
    return own_copy(value)
