"""Objects that `plain_values` does not encode, taken apart into values that it does."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

from pydantic import BaseModel

from buffer.errors import WireError

KIND = "kind of object"
"""Key of the map that stands for an object."""

Kinds = Mapping[str, tuple[type, Callable[[Any], Any], Callable[[Any], Any]]]
"""By name: a type, what takes one of its objects apart, and what puts it together."""


def apart(value: Any, kinds: Kinds) -> Any:
    """Return `value` with maps in place of all objects of these kinds, at any depth."""
    for name, (kind, take_apart, _) in kinds.items():
        if isinstance(value, kind):
            return {KIND: name, "of": apart(take_apart(value), kinds)}
    if isinstance(value, dict):
        return {key: apart(item, kinds) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(apart(item, kinds) for item in value)
    return value


def together(value: Any, kinds: Kinds) -> Any:
    """Return what `apart` was given. Raises WireError for an unknown kind or type."""
    if isinstance(value, dict):
        made = {key: together(item, kinds) for key, item in value.items()}
        if KIND not in made:
            return made
        if made[KIND] not in kinds:
            raise WireError(f"{made[KIND]!r} is no kind of object")
        return kinds[made[KIND]][2](made["of"])
    if type(value) in (list, tuple):
        return type(value)(together(item, kinds) for item in value)
    return value


def models_of(package: str) -> Kinds:
    """Return the kinds of pydantic models and enums; none of another package is ever made."""

    def type_of(name: str, base: type) -> Any:
        module, _, attribute = name.partition(":")
        if module.partition(".")[0] == package:
            found = getattr(importlib.import_module(module), attribute, None)
            if isinstance(found, type) and issubclass(found, base):
                return found
        raise WireError(f"{name[:200]!r} is no {base.__name__} of {package}")

    return {
        "enum": (
            Enum,
            lambda value: [_name_of(value), value.value],
            lambda parts: type_of(parts[0], Enum)(parts[1]),
        ),
        "model": (
            BaseModel,
            lambda value: [_name_of(value), dict(value)],
            lambda parts: type_of(parts[0], BaseModel)(**parts[1]),
        ),
    }


def _name_of(value: object) -> str:
    return f"{type(value).__module__}:{type(value).__qualname__}"
