"""The borders of functions that get rollouts: judges of one, judges of a group, and filters.

Groups travel in the wire format.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from buffer.wire.group import RolloutGroup
from buffer.wire.group_bytes import decode, encode
from buffer.wire.rollout import RolloutState
from producer_workers.user_code.border import Border
from producer_workers.user_code.checked_result import check_answer, check_answers, check_verdict

Shape = Literal["rollout", "group", "filter"]
"""How a function is called: with one rollout, with `states`, or with the group as its argument."""


class RolloutBorder(Border):
    """Its argument is a list of rollouts; what no judge reads of them does not cross."""

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
        return check_answer(name, result)


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
