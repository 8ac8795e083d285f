"""The borders of functions that get rollouts (judges and filters), in the wire format of groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, Literal

import numpy as np

from buffer.errors import JudgeError
from buffer.wire.group import RolloutGroup
from buffer.wire.group_bytes import decode, encode
from buffer.wire.rollout import RolloutState
from producer_workers.user_code.border import Border

# Called with one rollout, with `states`, or with the group as its argument.
Shape = Literal["rollout", "group", "filter"]


class RolloutBorder(Border):
    """Its argument is a list of rollouts, without the fields that no judge reads."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self._shape = shape

    def write(self, *arguments: Any) -> bytes:
        (states,) = arguments
        return write_rollouts(states)

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
            return check_verdict(name, result)
        if self._shape == "group":
            return check_answers(name, result, len(arguments[0]))
        return [check_answer(name, result)]


def write_rollouts(states: Sequence[RolloutState]) -> bytes:
    """Return rollouts as one group. Raises WireError."""
    slim = [state.model_copy(update={"routed_experts": None}) for state in states]
    return encode(RolloutGroup("called", "called", slim))


ROLLOUT = RolloutBorder("rollout")
GROUP = RolloutBorder("group")
FILTER = RolloutBorder("filter")

BORDERS: dict[Shape, str] = {
    "rollout": f"{__name__}:ROLLOUT",
    "group": f"{__name__}:GROUP",
    "filter": f"{__name__}:FILTER",
}


Number = Real | np.bool_  # to Python, a bool of numpy is not a number

LARGEST = float(np.finfo(np.float32).max)  # beyond it, a float32 is infinite

# Columns of a rollout that a judge may return beside its reward (`RolloutState`).
TOKEN_COLUMNS = ("token_rewards", "teacher_logprobs", "ref_logprobs", "values")


def _fits(value: Any) -> bool:
    try:
        return abs(float(value)) <= LARGEST
    except OverflowError:  # an integer beyond the range of floats
        return False


def _is_name(key: Any) -> bool:
    """Return whether `key` can be written as UTF-8, without half of a surrogate pair."""
    return isinstance(key, str) and not any("\ud800" <= char <= "\udfff" for char in key)


def check_verdict(what: str, result: Any) -> bool:
    """Return `result` of a filter of groups as a bool. Raises JudgeError."""
    if not isinstance(result, Number):
        raise JudgeError(f"{what} returned {type(result).__name__}", hint="return True or False")
    return bool(result)


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
    for key, value in reward.items():
        if not _is_name(key) or not isinstance(value, Number) or not _fits(value):
            raise JudgeError(
                f"{what} returned {key!r:.40} = {value!r:.80}",
                hint="every value of a reward is a finite number within float32 "
                "(.item() makes one of a tensor)",
            )
    return {key: float(value) for key, value in reward.items()}


def check_answer(name: str, result: Any) -> dict[str, Any]:
    """Return `result` as a reward with its token columns as lists. Raises JudgeError."""
    if not isinstance(result, Mapping):
        return check_reward(name, result)
    columns = {
        key: value
        for key, value in result.items()
        if key in TOKEN_COLUMNS and not isinstance(value, Number)
    }
    reward = {key: value for key, value in result.items() if key not in columns}
    return check_reward(name, reward) | {
        key: _column(name, key, value) for key, value in columns.items()
    }


def _column(name: str, key: str, value: Any) -> Any:
    if key == "teacher_logprobs" and isinstance(value, Mapping):
        for who in value:
            if not _is_name(who):
                raise JudgeError(
                    f"judge {name!r} returned {key} of {who!r:.40}", hint="a teacher has a name"
                )
        return {who: _column(name, f"{key}.{who}", row) for who, row in value.items()}
    try:
        column = np.asarray(value, np.float64)
    except (TypeError, ValueError):
        column = np.array(np.nan)
    if column.ndim != 1 or key == "teacher_logprobs" or not (abs(column) <= LARGEST).all():
        raise JudgeError(
            f"judge {name!r} returned {key} = {value!r:.80}",
            hint="return one finite number for each response token; teacher_logprobs are by the "
            "teacher's name",
        )
    return column.tolist()


def check_answers(name: str, results: Any, count: int) -> list[dict[str, Any]]:
    """Return `results` of judge `name` for `count` rollouts. Raises JudgeError."""
    is_list = isinstance(results, Sequence) and not isinstance(results, str | bytes)
    if not is_list or len(results) != count:
        raise JudgeError(
            f"judge {name!r} returned {results!r:.80}", hint=f"return a list of {count} rewards"
        )
    return [check_answer(name, result) for result in results]
