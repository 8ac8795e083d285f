"""Take objects of another trainer apart into values of a message, and put them together: no pickle.

Lists, maps with text keys, texts, bytes, numbers and None stay as they are. Arrays, tuples,
pydantic models, enums and handles of objects elsewhere become a map with the key `KIND`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from buffer.errors import WireError

KIND = "kind of object"

Kind = tuple[type, Callable[[Any], Any], Callable[[Any], Any]]
"""A type, what takes one of its objects apart, and what puts it together."""


class ObjectValues:
    """Converts the values of one project.

    `package` is the only one whose models and enums are made. `kinds` are of the project's own,
    for example references to Ray's objects, whose contents are kept.
    """

    def __init__(self, package: str, kinds: Mapping[str, Kind]) -> None:
        self._package = package
        self._kinds: dict[str, Kind] = {
            **kinds,
            "tuple": (tuple, list, tuple),
            "enum": (
                Enum,
                lambda value: [_name_of(value), value.value],
                lambda parts: self._type(parts[0], Enum)(parts[1]),
            ),
            "model": (
                BaseModel,
                lambda value: [_name_of(value), dict(value)],
                lambda parts: self._type(parts[0], BaseModel)(**parts[1]),
            ),
        }

    def apart(self, value: Any, keep: Callable[[NDArray[Any]], Any], where: str = "") -> Any:
        """Return plain values for `value`; `keep` returns what stands for the data of an array.

        Raises WireError, which says where, for an object of another kind.
        """
        if isinstance(value, np.ndarray) and not value.dtype.hasobject:
            return {KIND: "array", "of": [value.dtype.str, list(value.shape), keep(value)]}
        for name, (kind, take_apart, _) in self._kinds.items():
            if isinstance(value, kind):
                return {KIND: name, "of": self.apart(take_apart(value), keep, where)}
        if isinstance(value, list):
            return [self.apart(item, keep, where) for item in value]
        if isinstance(value, dict) and all(isinstance(key, str) and key != KIND for key in value):
            return {key: self.apart(item, keep, f"{where}.{key}") for key, item in value.items()}
        if value is None or isinstance(value, str | bytes | int | float):
            return value
        if isinstance(value, np.generic):
            return value.item()
        raise WireError(
            f"at {where.lstrip('.')}: a {type(value).__name__} cannot be kept",
            hint="arrays, lists, maps with text keys, texts, numbers and pydantic models can",
        )

    def together(self, value: Any, read: Callable[[Any], bytes]) -> Any:
        """Return what `apart` was given. Raises WireError for a type of another package."""
        if isinstance(value, list):
            return [self.together(item, read) for item in value]
        if not isinstance(value, dict):
            return value
        if KIND not in value:
            return {key: self.together(item, read) for key, item in value.items()}
        if value[KIND] == "array":
            dtype, shape, data = value["of"]
            return np.frombuffer(read(data), dtype).reshape(shape).copy()
        return self._kinds[value[KIND]][2](self.together(value["of"], read))

    def _type(self, name: str, base: type) -> Any:
        module, _, attribute = name.partition(":")
        if module.partition(".")[0] == self._package:
            found = getattr(importlib.import_module(module), attribute, None)
            if isinstance(found, type) and issubclass(found, base):
                return found
        raise WireError(f"{name[:200]!r} is no {base.__name__} of {self._package}")


def _name_of(value: object) -> str:
    return f"{type(value).__module__}:{type(value).__qualname__}"
