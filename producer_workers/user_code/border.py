"""Define what crosses between a caller and a user's function of one kind, in a process or not.

Both sides name a `Border` as "module:NAME". Every process of that kind imports the module, so it
must import little.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar

import msgspec
import numpy as np

from buffer.errors import JudgeError, RolloutMQError, ServiceAway, Skip, UserCodeError, describe
from buffer.failure_text import join_text
from buffer.imports import load_object
from buffer.wire.column import Number
from buffer.wire.columns import all_columns, column_named
from buffer.wire.group import RolloutGroup
from buffer.wire.group_bytes import decode, encode
from buffer.wire.rollout import RolloutState
from producer_workers.user_code.failure import log_once, user_trace


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

    def trace(self, error: BaseException) -> str:
        """Return the traceback of the user's code, "" if the caller is to blame."""
        return user_trace(error)

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
    trace: str = ""  # `user_trace`
    is_own: bool = False  # whether `said` is of this project, and names the function
    is_out_of_memory: bool = False
    is_away: bool = False  # a `ServiceAway`
    is_skip: bool = False

    @classmethod
    def of(cls, error: BaseException, border: Border) -> Failure:
        if isinstance(error, Skip):
            return cls(error.message, error.message, is_own=True, is_skip=True)
        trace = border.trace(error)
        if isinstance(error, RolloutMQError):
            is_away = isinstance(error, ServiceAway)
            told = border.told(error)
            return cls(error.message, told, error.hint, trace, is_own=True, is_away=is_away)
        empty = isinstance(error, StopIteration)
        hint = "next(...) found nothing: give it a default" if empty else ""
        is_memory = isinstance(error, MemoryError)
        return cls(describe(error), border.told(error), hint, trace, is_out_of_memory=is_memory)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How one function is called, and how errors name it.

    `what`: kind and name. `limit_s`: of each call. `memory_mb`: address space of a process, or 0.
    `limit_key`, `memory_key`: their settings. `grace_s`: time in which an unwanted call must end,
    and a process answer that it runs, if it makes other calls.
    """

    what: str
    name: str
    limit_s: float
    limit_key: str
    memory_mb: int = 0
    memory_key: str = ""
    processes: int = 1
    mode: Mode = "plain"
    grace_s: float = 1.0
    start_s: float = 300.0  # time in which a process must have imported the function
    error: type[UserCodeError] = UserCodeError
    hint: str = ""  # what to do about an exception, where nothing better is known

    def failed(self, failure: Failure) -> UserCodeError | ServiceAway | Skip:
        """Return the error of a call that failed; log its traceback once for its cause."""
        if failure.is_skip:
            return Skip(failure.said)
        if failure.is_away:
            return ServiceAway(failure.said, hint=failure.hint)
        said = failure.said if failure.is_own else f"{self.what} raised {failure.said}"
        hint = failure.hint if failure.is_own else failure.hint or self.hint
        if failure.is_out_of_memory and self.memory_key:
            hint = f"see {self.memory_key}"
        if failure.trace:
            log_once(join_text(said, failure.trace))
        return self.error(said, hint=hint, told=failure.told, trace=failure.trace)

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
    should_continue_fn. It runs in a thread, or in the event loop if it is a
    coroutine function, which must not block.
    """
    setattr(function, _MARK, True)
    return function


def is_marked_inline(function: Callable[..., Any]) -> bool:
    return bool(getattr(function, _MARK, False))


def is_of_this_project(code: Any) -> bool:
    """Return whether a function or class is no user's, so that it changes nothing it is given."""
    return str(code.__module__).partition(".")[0] in ("producer_workers", "rolloutmq")


# -- rollouts, as judges and filters get them ---------------------------------

# Called with one rollout, with `states`, or with the group as its argument.
Shape = Literal["rollout", "group", "filter"]


class RolloutBorder(Border):
    """Its argument is a list of rollouts, without the fields that no judge reads."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self._shape = shape

    def write(self, *arguments: Any) -> bytes:
        (states,) = arguments
        slim = [state.slim() for state in states]
        return encode(RolloutGroup("called", "called", slim))

    def read(self, data: bytes) -> tuple[Any, ...]:
        return (decode(data).states,)

    def call(self, function: Any, *arguments: Any) -> Any:
        states: Sequence[RolloutState] = arguments[0]
        if self._shape == "filter":
            return function(list(states))
        if self._shape == "group":
            return function(states=list(states))
        (state,) = states
        return function(response=state.response, ground_truth=state.ground_truth, state=state)

    def check(self, name: str, result: Any, *arguments: Any) -> Any:
        if self._shape == "filter":
            if not isinstance(result, Number):
                what = type(result).__name__
                raise JudgeError(f"{name} returned {what}", hint="return True or False")
            return bool(result)
        if self._shape == "group":
            return check_answers(name, result, len(arguments[0]))
        return [check_answer(name, result)]


ROLLOUT = RolloutBorder("rollout")
GROUP = RolloutBorder("group")
FILTER = RolloutBorder("filter")

BORDERS: dict[Shape, str] = {
    "rollout": f"{__name__}:ROLLOUT",
    "group": f"{__name__}:GROUP",
    "filter": f"{__name__}:FILTER",
}


LARGEST = float(np.finfo(np.float32).max)  # beyond it, a float32 is infinite

TURN_REWARDS = "turn_rewards"  # beside a reward: a number for each turn of the model


_HALF_OF_A_PAIR = re.compile("[\ud800-\udfff]")  # cannot be written as UTF-8


def check_reward(name: str, result: Any) -> dict[str, float]:
    """Return `result` of judge `name` as a reward; a number is its score. Raises JudgeError."""
    reward = {"score": result} if isinstance(result, Number) else result
    if not isinstance(reward, Mapping) or "score" not in reward:
        raise JudgeError(
            f"judge {name!r} returned {result!r:.80}",
            hint='return a finite number, or a dict of finite numbers that holds "score"',
        )
    return check_numbers(f"judge {name!r}", reward)


def check_numbers(what: str, reward: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers by name that `what` returned. Raises JudgeError."""
    numbers: dict[str, float] = {}
    for key, value in reward.items():
        is_name = isinstance(key, str) and not _HALF_OF_A_PAIR.search(key)
        try:
            number = float(value) if isinstance(value, Number) else math.inf
        except OverflowError:  # an integer beyond the range of floats
            number = math.inf
        if not is_name or not abs(number) <= LARGEST:
            raise JudgeError(
                f"{what} returned {key!r:.40} = {value!r:.80}",
                hint="every value of a reward is a finite number within float32 "
                "(.item() makes one of a tensor), or a column of the rollout: "
                + ", ".join(column.name for column in all_columns() if not column.is_large),
            )
        numbers[key] = number
    return numbers


def raise_skip(answer: Any) -> None:
    """Raise Skip for the answer {"skip": "reason"}, as other processes and services give it."""
    if isinstance(answer, Mapping) and isinstance(reason := answer.get("skip"), str):
        raise Skip(reason)


def check_answer(name: str, result: Any, *, has_columns: bool = True) -> dict[str, Any]:
    """Return `result` as a reward, with columns as lists. Raises JudgeError, Skip."""
    if not isinstance(result, Mapping):
        return check_reward(name, result)
    raise_skip(result)
    reward, lists = {}, {}
    for key, value in result.items():
        column = column_named(key) if has_columns else None
        try:
            if key == TURN_REWARDS and not isinstance(value, Number):
                lists[key] = turn_rewards(value)
            elif column and column.is_answer(value):
                lists[key] = column.plain(column.read(value))
            else:
                reward[key] = value
        except (TypeError, ValueError) as error:
            raise JudgeError(
                f"judge {name!r} returned {key} = {value!r:.80}: {error}",
                hint="return one finite number for each response token, as turn_rewards for each "
                "turn of the model; teacher_logprobs are by the teacher's name",
            ) from error
    return check_reward(name, reward) | lists


def turn_rewards(value: Any) -> list[float]:
    array = np.asarray(value, np.float64)
    if array.ndim != 1 or not (abs(array) <= LARGEST).all():
        raise ValueError("not a list of finite numbers")
    rewards: list[float] = array.tolist()
    return rewards


def check_answers(name: str, results: Any, count: int) -> list[dict[str, Any]]:
    """Return `results` of judge `name` for `count` rollouts. Raises JudgeError, Skip."""
    raise_skip(results)
    is_list = isinstance(results, Sequence) and not isinstance(results, str | bytes)
    if not is_list or len(results) != count:
        raise JudgeError(
            f"judge {name!r} returned {results!r:.80}", hint=f"return a list of {count} rewards"
        )
    return [check_answer(name, result) for result in results]
