"""Define what crosses between a caller and a user's function of one kind, in a process or not.

Both sides name a `Border` as "module:NAME". Every process of that kind imports the module, so it
must import little.
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

    Subclasses change steps of a call:

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
        """Return an error in words for the model that made the call."""
        return describe(error)


def load_border(spec: str) -> Border:
    border = load_object(spec, kind="border")
    if not isinstance(border, Border):
        raise UserCodeError(f"{spec} is not a Border")
    return border


# How a process makes calls: one after the other; many in its event loop; many in threads.
Mode = Literal["plain", "coroutines", "threads"]

# Calls that one process makes at once.
ROOM: dict[Mode, int] = {"plain": 1, "coroutines": 64, "threads": 16}


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a call has no result. It crosses from the process of a function to its caller."""

    said: str
    told: str  # the text for a model
    hint: str = ""
    frames: str = ""  # places in the user's code, the innermost last, one a line
    is_own: bool = False  # whether `said` is of this project, and names the function
    is_out_of_memory: bool = False

    @classmethod
    def of(cls, error: BaseException, border: Border) -> Failure:
        frames = "\n".join(user_frames(error))
        if isinstance(error, RolloutMQError):
            return cls(error.message, border.told(error), error.hint, frames, is_own=True)
        empty = isinstance(error, StopIteration)
        hint = "next(...) found nothing: give it a default" if empty else ""
        is_memory = isinstance(error, MemoryError)
        return cls(describe(error), border.told(error), hint, frames, is_out_of_memory=is_memory)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How one function is called, and how errors name it.

    `what`: kind and name. `limit_s`: of each call. `memory_mb`: address space of a process, or 0.
    `limit_key`, `memory_key`: their settings. `repeats`: a call whose process ended is repeated
    alone. `grace_s`: time in which an unwanted call must end if its process makes others.
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
    start_s: float = 300.0  # time in which a process must have imported the function
    error: type[UserCodeError] = UserCodeError
    hint: str = ""  # what to do about an exception, where nothing better is known

    def failed(self, failure: Failure) -> UserCodeError:
        said = failure.said if failure.is_own else f"{self.what} raised {failure.said}"
        hint = failure.hint if failure.is_own else failure.hint or self.hint
        if failure.is_out_of_memory and self.memory_key:
            hint = f"see {self.memory_key}"
        return self.error(said, hint=hint, told=failure.told, frames=failure.frames)

    def over_limit(self) -> UserCodeError:
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
    """Mark a function of yours that answers in milliseconds and never hangs: it needs no process.

    It may be a judge, filter, tool, environment factory, agent, record function, data set factory,
    order, curriculum or should_continue_fn. It runs in a thread, or in the event loop if it is a
    coroutine function, which must not block.
    """
    setattr(function, _MARK, True)
    return function


def is_marked_inline(function: Callable[..., Any]) -> bool:
    return bool(getattr(function, _MARK, False))
