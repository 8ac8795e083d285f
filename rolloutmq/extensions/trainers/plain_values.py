"""Python values with arrays and tensors as msgpack, without pickle: for objects of other projects.

Values that msgpack has stay as they are; others become [kind, …]. Only exact types are encoded:
a subclass could have state that would be lost. Tensors are restored on the CPU.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

import msgspec
import numpy as np
from pydantic import BaseModel

from buffer.errors import WireError

_ARRAYS = "biufcUSmM"
"""Kinds of numpy's types that are bytes; others are objects or structures."""


def encode(value: Any, where: str) -> bytes:
    """Return the bytes of `value`. Raises WireError, with the place of what cannot be encoded."""
    try:
        return msgspec.msgpack.encode(_pack(value, where))
    except RecursionError:
        raise WireError(f"{where} is nested too deeply, or contains itself") from None


def decode(data: bytes) -> Any:
    """Return the value of these bytes. Raises WireError."""
    try:
        return _unpack(msgspec.msgpack.decode(data))
    except (msgspec.DecodeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise WireError(f"these bytes are no value of `encode`: {error}") from error


def _pack(value: Any, where: str) -> Any:
    kind = type(value)
    if value is None or kind in (bool, float, str, bytes):
        return value
    if kind is int:
        if -(2**63) <= value < 2**64:
            return value
        raise WireError(f"{where} is {value}, which does not fit into 64 bits")
    if kind in (list, tuple):
        return [kind.__name__, [_pack(item, f"{where}[{n}]") for n, item in enumerate(value)]]
    if kind is dict:
        pairs = value.items()
        return [
            "dict",
            [[_pack(k, f"a key of {where}"), _pack(v, f"{where}.{k}")] for k, v in pairs],
        ]
    if kind is np.ndarray and value.dtype.kind == "O":
        items = [_pack(item, f"{where}[{n}]") for n, item in enumerate(value.flat)]
        return ["objects", list(value.shape), items]
    if kind is np.ndarray or issubclass(kind, np.generic):
        if value.dtype.kind in _ARRAYS:
            name = "array" if kind is np.ndarray else "number"
            return [name, value.dtype.str, list(value.shape), value.tobytes()]
    elif kind.__module__ == "torch":
        return _pack_tensor(value, where)
    raise WireError(
        f"{where} is a {kind.__module__}.{kind.__qualname__}, which cannot be sent without pickle",
        hint="only None, bool, int, float, str, bytes, lists, tuples, dicts, numpy arrays and "
        "dense tensors can: remove it from the sample, or replace it",
    )


def _pack_tensor(value: Any, where: str) -> Any:
    import torch

    if type(value) is not torch.Tensor or value.is_nested or value.layout is not torch.strided:
        raise WireError(f"{where} is a {type(value).__name__}, and no dense torch.Tensor")
    if value.is_quantized:
        raise WireError(f"{where} is a quantized tensor")
    flat = value.detach().cpu().contiguous().reshape(-1)
    data = flat.view(torch.uint8).numpy().tobytes()
    return ["tensor", str(value.dtype).removeprefix("torch."), list(value.shape), data]


def _unpack(value: Any) -> Any:
    if type(value) is not list:
        return value
    kind, *parts = value
    return _KINDS[kind](*parts)


def _array(dtype: str, shape: list[int], data: bytes) -> Any:
    kind = np.dtype(dtype)
    if kind.kind not in _ARRAYS:
        raise ValueError(f"arrays of {dtype}")
    return np.ndarray(shape, kind, bytearray(data))


def _objects(shape: list[int], items: list[Any]) -> Any:
    # not np.array(items), which would look into lists
    array = np.empty(len(items), object)
    for n, item in enumerate(items):
        array[n] = _unpack(item)
    return array.reshape(shape)


def _tensor(dtype: str, shape: list[int], data: bytes) -> Any:
    import torch

    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype):
        raise ValueError(f"tensors of {dtype}")
    if not data:
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(bytearray(data), dtype=kind).reshape(shape)


_KINDS: dict[str, Callable[..., Any]] = {
    "list": lambda items: [_unpack(item) for item in items],
    "tuple": lambda items: tuple(_unpack(item) for item in items),
    "dict": lambda pairs: {_unpack(key): _unpack(item) for key, item in pairs},
    "objects": _objects,
    "array": _array,
    "number": lambda *parts: _array(*parts)[()],
    "tensor": _tensor,
}


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
