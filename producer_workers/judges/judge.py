"""Define a judge, which turns one completed rollout into a reward.

Where a judge raises, or returns something that is not a reward, the error names it and nothing is
passed on: a NaN in one reward would reach every weight of the model.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, Protocol, runtime_checkable

import numpy as np

from buffer.errors import JudgeError
from buffer.model.rollout import RolloutState
from producer_workers.judges.user_function import Shape


class Judge(Protocol):
    """Scores rollouts. Messages call it by its `name`.

    Usage:
        class Longest:
            name = "longest"

            async def judge(self, state):
                return {"score": float(len(state.response_ids))}
    """

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

LARGEST = float(np.finfo(np.float32).max)
"""The largest score: beyond it, a float32 is infinite."""


async def judge_all(judge: AnyJudge, states: Sequence[RolloutState]) -> list[dict[str, float]]:
    """Return the rewards of some rollouts of a group, from a judge of either kind.

    Raises JudgeError.
    """
    if isinstance(judge, GroupJudge):
        return await judge.judge_group(states)
    return list(await asyncio.gather(*(judge.judge(state) for state in states)))


def rollout_fields(state: RolloutState) -> dict[str, Any]:
    """Return what a judge by HTTP or rq gets of a rollout: all but its logprobs and weights.

    It is plain JSON where the data set is.
    """
    mask = state.response_mask
    return {
        "index": state.index,
        "response": state.response,
        "finish_reason": state.finish_reason,
        "ground_truth": state.ground_truth,
        "data_source": state.data_source,
        "messages": state.messages,
        "tool_calls": [call.model_dump() for call in state.tool_calls],
        "reward": state.reward,
        "extra": state.extra,
        "response_ids": state.response_ids.tolist(),
        "response_mask": None if mask is None else mask.tolist(),
    }


def rollout_of(fields: dict[str, Any]) -> RolloutState:
    """Return the rollout of `rollout_fields`. Its logprobs are NaN: nobody can take them for 0."""
    logprobs = np.full(len(fields["response_ids"]), np.nan, "<f4")
    return RolloutState(**fields, logprobs=logprobs)


def _fits(value: Real) -> bool:
    """Return whether `value` is finite as a float32, which is what trainers get."""
    try:
        return abs(float(value)) <= LARGEST
    except OverflowError:  # an integer beyond the range of floats
        return False


def check_verdict(what: str, result: Any) -> bool:
    """Return `result` of a filter of groups as a bool. Raises JudgeError."""
    if not isinstance(result, Real | np.bool_):
        raise JudgeError(f"{what} returned {type(result).__name__}", hint="return True or False")
    return bool(result)


def check_reward(name: str, result: Any) -> dict[str, float]:
    """Return `result` of judge `name` as a reward; a number is its score. Raises JudgeError."""
    reward = {"score": result} if isinstance(result, Real) else result
    if not isinstance(reward, Mapping) or "score" not in reward:
        raise JudgeError(
            f"judge {name!r} returned {result!r:.80}",
            hint='return a finite number, or a dict of finite numbers that holds "score"',
        )
    for key, value in reward.items():
        if not isinstance(key, str) or not isinstance(value, Real) or not _fits(value):
            raise JudgeError(
                f"judge {name!r} returned {key!r:.40} = {value!r:.80}",
                hint="every value of a reward is a finite number within float32 "
                "(.item() makes one of a tensor)",
            )
    return {key: float(value) for key, value in reward.items()}


def check_rewards(name: str, results: Any, count: int) -> list[dict[str, float]]:
    """Return `results` of judge `name` as rewards of `count` rollouts. Raises JudgeError."""
    is_list = isinstance(results, Sequence) and not isinstance(results, str | bytes)
    if not is_list or len(results) != count:
        raise JudgeError(
            f"judge {name!r} returned {results!r:.80}", hint=f"return a list of {count} rewards"
        )
    return [check_reward(name, result) for result in results]


def checked(shape: Shape, name: str, result: Any, count: int) -> Any:
    """Return what a function returned for `count` rollouts, as its shape demands it.

    Raises JudgeError.
    """
    if shape == "filter":
        return check_verdict(name, result)
    return check_rewards(name, result, count) if shape == "group" else check_reward(name, result)
