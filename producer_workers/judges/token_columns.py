"""The token columns that a judge may give beside its reward, such as process rewards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from buffer.errors import JudgeError
from buffer.wire.rollout import RolloutState
from producer_workers.user_code.checked_result import TOKEN_COLUMNS


def take_columns(name: str, state: RolloutState, answer: Mapping[str, Any]) -> dict[str, float]:
    """Give a rollout the token columns of a checked answer of judge `name`; return its reward.

    Raises JudgeError for a column that has another length than the response.
    """
    reward = dict(answer)
    for column in TOKEN_COLUMNS:
        given = reward.pop(column) if isinstance(reward.get(column), list | dict) else None
        if isinstance(given, dict):
            rows = {who: _values(name, column, row, state) for who, row in given.items()}
            setattr(state, column, rows)
        elif given is not None:
            setattr(state, column, _values(name, column, given, state))
    return reward


def columns_of(state: RolloutState) -> dict[str, Any]:
    """Return the token columns of a judged rollout, as a judge's answer has them."""
    found = {}
    for name in TOKEN_COLUMNS:
        column = getattr(state, name)
        if isinstance(column, dict):
            found[name] = {who: row.tolist() for who, row in column.items()}
        elif column is not None:
            found[name] = column.tolist()
    return found


def _values(
    name: str, column: str, values: list[float], state: RolloutState
) -> NDArray[np.float32]:
    tokens = len(state.response_ids)
    if len(values) != tokens:
        raise JudgeError(
            f"judge {name!r} returned {len(values)} {column} for {tokens} response tokens",
            hint="return one number for each of state.response_ids",
        )
    return np.array(values, "<f4")
