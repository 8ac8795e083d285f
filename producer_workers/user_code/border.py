"""Define what crosses between a caller and a user's function of one kind, in a process or not.

A module of a kind has one `Border` as a constant, which both sides name as "module:NAME". Its
module is imported in every process of that kind, so it must import little.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import msgspec

from buffer.errors import UserCodeError, describe
from buffer.imports import load_object


class Border:
    """A kind of function whose arguments are values of the types in `arguments`.

    Subclasses change one step or another of a call:

        write ──▶ read ──▶ call ──▶ check ──▶ result
        caller    └──── its process ────┘     caller
    """

    def __init__(self, arguments: Any = tuple[Any, ...]) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(arguments)

    def load(self, path: str, options: Mapping[str, Any]) -> Any:
        """Return what is called for the object at `path`."""
        return self.prepare(load_object(path, kind="function"), options)

    def prepare(self, function: Any, options: Mapping[str, Any]) -> Any:
        """Return what is called for `function`: itself, with `options` as arguments."""
        return partial(function, **options) if options else function

    def write(self, *arguments: Any) -> bytes:
        """Return the arguments of a call as bytes. Raises TypeError, ValueError, WireError."""
        return self._encoder.encode(arguments)

    def read(self, data: bytes) -> tuple[Any, ...]:
        """Return the arguments that `write` wrote."""
        arguments: tuple[Any, ...] = self._decoder.decode(data)
        return arguments

    def call(self, function: Any, *arguments: Any) -> Any:
        """Call the function; what it returns may be a coroutine."""
        return function(*arguments)

    def check(self, name: str, result: Any, *arguments: Any) -> Any:
        """Return what the function `name` returned, as plain values. Raises UserCodeError."""
        return result

    def result(self, plain: Any) -> Any:
        """Return the result of the call from what `check` returned."""
        return plain

    def told(self, error: BaseException) -> str:
        """Return an error in the words that a model gets, where a model made the call."""
        return describe(error)


def load_border(spec: str) -> Border:
    """Return the border at "module:NAME"."""
    border = load_object(spec, kind="border")
    if not isinstance(border, Border):
        raise UserCodeError(f"{spec} is not a Border")
    return border
