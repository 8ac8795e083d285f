"""Define what crosses between a caller and a user's function of one kind, in a process or not.

A module of a kind has one `Border` as a constant, which both sides name as "module:NAME". Its
module is imported in every process of that kind, so it must import little.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar

import msgspec

from buffer.errors import RolloutMQError, UserCodeError, describe
from buffer.imports import load_object
from producer_workers.user_code.user_frames import user_frames


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


Mode = Literal["plain", "coroutines", "threads"]
"""How a process makes calls: one after the other; many in its event loop; many in threads."""

ROOM: dict[Mode, int] = {"plain": 1, "coroutines": 64, "threads": 16}
"""Calls that one process makes at once."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a call has no result. It crosses from the process of a function to its caller."""

    said: str
    told: str
    """what a model gets to read of it"""
    hint: str = ""
    frames: str = ""
    """where it was raised in the user's code, the innermost last, one a line"""
    is_own: bool = False
    """whether `said` is of this project, and names the function"""
    is_out_of_memory: bool = False

    @classmethod
    def of(cls, error: BaseException, border: Border) -> Failure:
        """Return why a call that raised `error` has no result."""
        frames = "\n".join(user_frames(error))
        if isinstance(error, RolloutMQError):
            return cls(error.message, border.told(error), error.hint, frames, is_own=True)
        empty = isinstance(error, StopIteration)
        hint = "next(...) found nothing: give it a default" if empty else ""
        is_memory = isinstance(error, MemoryError)
        return cls(describe(error), border.told(error), hint, frames, is_out_of_memory=is_memory)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How one function is called, and what errors say of it.

    `what`: kind and name. `limit_s`: of each call. `memory_mb`: address space of a process, 0 for
    no limit. `limit_key`, `memory_key`: the settings of these. `repeats`: a call is made again,
    alone, where its process ended, perhaps for another call's fault. `grace_s`: time in which a
    call that is not wanted any more must end, where its process makes others, too.
    """

    what: str
    name: str
    limit_s: float
    limit_key: str
    memory_mb: int = 0
    memory_key: str = ""
    processes: int = 1
    mode: Mode = "plain"
    repeats: bool = True
    grace_s: float = 1.0
    start_s: float = 300.0
    """time in which a process must have imported the function"""
    error: type[UserCodeError] = UserCodeError
    hint: str = ""
    """what to do about an exception, where nothing better is known"""

    def failed(self, failure: Failure) -> UserCodeError:
        """Return the error of a call that failed."""
        said = failure.said if failure.is_own else f"{self.what} raised {failure.said}"
        hint = failure.hint if failure.is_own else failure.hint or self.hint
        if failure.is_out_of_memory and self.memory_key:
            hint = f"see {self.memory_key}"
        return self.error(said, hint=hint, told=failure.told, frames=failure.frames)

    def over_limit(self) -> UserCodeError:
        """Return the error of a call that took too long."""
        return self.error(
            f"{self.what} exceeded its limit of {self.limit_s:g} s",
            hint=f"raise {self.limit_key}, or make it faster"
            if self.limit_key
            else "make it faster",
            told=f"{self.name} took longer than {self.limit_s:g} s",
        )

    def ended(self, how: str) -> UserCodeError:
        """Return the error of a call that ended its process."""
        return self.error(
            f"{self.what} ended its process: {how}",
            hint="see the log of this process",
            told=f"{self.name} ended its process: {how}",
        )


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
