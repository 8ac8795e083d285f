"""Define a judge, which turns one completed rollout into a reward."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from buffer.errors import JudgeError
from buffer.wire.rollout import RolloutState
from producer_workers.user_code.rollout_border import TOKEN_COLUMNS


class Judge(Protocol):
    """Scores rollouts. Messages call it by its `name`."""

    name: str

    async def judge(self, state: RolloutState) -> dict[str, float]:
        """Return the reward of `state`, with "score" in it.

        Raises JudgeError; in a worker also JudgeInterrupted, which leaves the rollout ABORTED.
        """
        ...


@runtime_checkable
class GroupJudge(Protocol):
    """Scores the rollouts of a group together, once all of them have ended."""

    name: str

    async def judge_group(self, states: Sequence[RolloutState]) -> list[dict[str, float]]:
        """Return the reward of each, in their order. Raises what `Judge.judge` raises."""
        ...


AnyJudge = Judge | GroupJudge


async def judge_all(judge: AnyJudge, states: Sequence[RolloutState]) -> list[dict[str, float]]:
    """Return the rewards of rollouts of a group, from a judge of either kind. Raises JudgeError."""
    if isinstance(judge, GroupJudge):
        return await judge.judge_group(states)
    return list(await asyncio.gather(*(judge.judge(state) for state in states)))


def rollout_fields(state: RolloutState) -> dict[str, Any]:
    """Return a rollout for a judge by HTTP or rq, as JSON without its logprobs and weights."""
    mask = state.response_mask
    return {
        "index": state.index,
        "response": state.response,
        "finish_reason": state.finish_reason,
        "ground_truth": state.ground_truth,
        "data_source": state.data_source,
        "messages": state.messages,
        "tool_calls": [structs.asdict(call) for call in state.tool_calls],
        "reward": state.reward,
        "extra": state.extra,
        "response_ids": state.response_ids.tolist(),
        "response_mask": None if mask is None else mask.tolist(),
    }


def rollout_of(fields: dict[str, Any]) -> RolloutState:
    """Return the rollout of `rollout_fields`. Its logprobs are NaN, since 0 is a valid one."""
    logprobs = np.full(len(fields["response_ids"]), np.nan, "<f4")
    return RolloutState(**fields, logprobs=logprobs)


def take_columns(name: str, state: RolloutState, answer: Mapping[str, Any]) -> dict[str, float]:
    """Give a rollout the token columns of a judge's checked answer; return its reward.

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
