"""Judges, which turn completed rollouts into rewards: one function, the user's or a built-in one.

`function(response=..., ground_truth=..., state=...)` returns a number, or a dict of numbers with
"score" and perhaps columns (`buffer.wire.columns`). `function(states=[...])` gets whole groups, and
returns one reward for each rollout, in order.
"""

from __future__ import annotations

import asyncio
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
from msgspec import structs

from buffer.errors import JudgeError, RolloutMQError, Skip, WireError
from buffer.groups.verdicts import Verdicts
from buffer.wire.columns import all_columns, column_named
from buffer.wire.rollout import RolloutState
from producer_workers.call_turns import Turns
from producer_workers.config.task import JudgingSection
from producer_workers.user_code.border import (
    BORDERS,
    TURN_REWARDS,
    Rules,
    Shape,
    check_numbers,
    load_border,
)
from producer_workers.user_code.process_function import ProcessFunction
from producer_workers.user_code.user_function import UserFunction, outcome_of


class Judge(ABC):
    """Scores rollouts, or groups of them if it `sees_group`. Messages call it by its `name`.

    Its methods raise JudgeError and Skip; in a worker also JudgeInterrupted, which leaves
    rollouts ABORTED.
    """

    name: str
    sees_group = False
    is_quick = False
    """whether it answers at once, so that the rollouts of a group are judged in one call"""

    async def judge(self, state: RolloutState) -> dict[str, float]:
        """Return the reward of `state`, with "score" in it."""
        return (await self.ask([state]))[0]

    async def judge_group(self, states: Sequence[RolloutState]) -> list[dict[str, float]]:
        """Return the reward of each rollout of a group, in their order."""
        if self.sees_group:
            return await self.ask(states)
        return list(await asyncio.gather(*map(self.judge, states)))

    async def judge_each(
        self, states: Sequence[RolloutState]
    ) -> list[dict[str, float] | RolloutMQError]:
        """Return of each rollout its reward, or why it has none. Only a judge that `is_quick`."""
        raise NotImplementedError

    @abstractmethod
    async def ask(self, states: Sequence[RolloutState]) -> list[dict[str, float]]:
        """Make one call, for one rollout or, if it `sees_group`, for a group."""

    counts_use = False
    """whether it tells its `verdicts` what it uses, also if none are kept, and finds them itself"""
    verdicts: Verdicts | None = None

    def under(self, turns: Turns) -> Judge:
        """Return this judge; its calls wait for their turns, before their time limits begin."""
        ask, self.is_quick = self.ask, False

        async def ask_in_turn(states: Sequence[RolloutState]) -> list[dict[str, float]]:
            async with turns.turn():
                return await ask(states)

        self.ask = ask_in_turn  # type: ignore[method-assign]
        return self

    def identity(self) -> str:
        """Return what tells this judge from others, and from itself after a change."""
        return self.name

    def close(self) -> None:  # noqa: B027 (most have nothing to end)
        """End what the judge started."""


class FunctionJudge(Judge):
    """Judges with `function`: in this process, or in processes that import it by `path`.

    `is_quick`: it is known to answer in milliseconds. `options`: see `judge_call`.
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        judging: JudgingSection = JudgingSection(),  # noqa: B008 (frozen)
        *,
        path: str | None = None,
        is_quick: bool = False,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.name = name
        self.sees_group = _sees_group(function)
        shape: Shape = "group" if self.sees_group else "rollout"
        self._call = judge_call(
            f"judge {name!r}", name, function, shape, judging, path=path, options=options
        )
        self._function = function
        is_plain = path is None and not inspect.iscoroutinefunction(function)
        self.is_quick = is_quick and is_plain and not self.sees_group

    async def ask(self, states: Sequence[RolloutState]) -> list[dict[str, float]]:
        return take_columns(self.name, states, await self._call(states))

    def identity(self) -> str:
        function = self._function.func if isinstance(self._function, partial) else self._function
        with suppress(OSError, TypeError):  # written in C, or in no file
            return f"{self.name} {inspect.getsource(inspect.getmodule(function) or function)}"
        return self.name

    async def judge_each(
        self, states: Sequence[RolloutState]
    ) -> list[dict[str, float] | RolloutMQError]:
        assert isinstance(self._call, UserFunction)
        try:
            outcomes = await self._call.call_each([([state],) for state in states])
        except JudgeError:  # over its limit: only a call of its own tells which rollout is
            outcomes = [await outcome_of(partial(self._call, [state])) for state in states]
        judged: list[dict[str, float] | RolloutMQError] = []
        for state, (answers, error) in zip(states, outcomes, strict=True):
            try:
                if error:
                    raise error
                judged += take_columns(self.name, [state], answers)
            except Skip:
                raise
            except RolloutMQError as failure:
                judged.append(failure)
        return judged

    def close(self) -> None:
        self._call.close()


class BareJudge(Judge):
    """Calls `function` in the caller's thread, without limits, and raises what it raises."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.name = name
        self.sees_group = _sees_group(function)
        self._function = function
        self._border = load_border(BORDERS["group" if self.sees_group else "rollout"])

    async def ask(self, states: Sequence[RolloutState]) -> list[dict[str, float]]:
        result = self._border.call(self._function, states)
        if inspect.isawaitable(result):
            result = await result
        return take_columns(self.name, states, self._border.check(self.name, result, states))


def _sees_group(function: Callable[..., Any]) -> bool:
    try:
        return "states" in inspect.signature(function).parameters
    except ValueError:  # a function in C, without a signature
        return False


def function_rules(
    what: str, name: str, judging: JudgingSection, *, is_coroutine: bool = False
) -> Rules:
    """Return how a judge, or a filter of groups, is called."""
    return Rules(
        what=what,
        name=name,
        limit_s=judging.timeout_s,
        limit_key="[tasks.<name>.judging] timeout_s",
        memory_mb=judging.memory_mb,
        memory_key="[tasks.<name>.judging] memory_mb",
        processes=judging.processes,
        mode="coroutines" if is_coroutine else "plain",
        error=JudgeError,
    )


def judge_call(
    what: str,
    name: str,
    function: Callable[..., Any],
    shape: Shape,
    judging: JudgingSection,
    *,
    path: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> UserFunction | ProcessFunction:
    """Return what calls a judge, or a filter of groups: here, or in processes that import `path`.

    `options`: further arguments of a function in processes.
    """
    is_coroutine = inspect.iscoroutinefunction(function)
    rules = function_rules(what, name, judging, is_coroutine=is_coroutine)
    if path is not None:
        return ProcessFunction(path, BORDERS[shape], rules, options)
    return UserFunction(function, load_border(BORDERS[shape]), rules)


# -- what a judge gets and answers -------------------------------------------


def rollout_fields(state: RolloutState) -> dict[str, Any]:
    """Return a rollout for a judge by HTTP or rq, as JSON without its logprobs and weights."""
    mask = state.response_mask
    return {
        "index": state.index,
        "role": state.role,
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


def take_columns(
    name: str, states: Sequence[RolloutState], answers: Sequence[Mapping[str, Any]]
) -> list[dict[str, float]]:
    """Give rollouts the columns of a judge's checked answers; return their rewards.

    Raises JudgeError for a column that does not fit the response, or its turns.
    """
    rewards = []
    for state, answer in zip(states, answers, strict=True):
        reward = _give_columns(name, state, answer)
        try:
            reward_turns([state], reward)
        except WireError as error:
            raise JudgeError(f"judge {name!r} returned {error.message}", hint=error.hint) from error
        rewards.append(reward)
    return rewards


def add_columns(
    name: str, states: Sequence[RolloutState], answers: Sequence[Mapping[str, Any]]
) -> None:
    """Give judged rollouts the columns and numbers of a `ColumnJudge`. Raises JudgeError."""
    if len(answers) != len(states):
        raise JudgeError(f"judge {name!r} gave {len(answers)} answers for {len(states)} rollouts")
    for state, answer in zip(states, answers, strict=True):
        numbers = check_numbers(f"judge {name!r}", _give_columns(name, state, answer))
        state.reward = {**numbers, **(state.reward or {})}


def _give_columns(name: str, state: RolloutState, answer: Mapping[str, Any]) -> dict[str, Any]:
    """Set the columns in an answer, and return the rest of it. Raises JudgeError."""
    rest, columns = dict(answer), []
    try:
        for key, value in answer.items():
            column = column_named(key)
            if column and column.is_answer(value):
                column.set(state, column.read(rest.pop(key)))
                columns.append(column)
    except (TypeError, ValueError) as error:
        raise JudgeError(f"judge {name!r}: {error}") from error
    for column in columns:  # when all are set, since some need each other
        if problem := column.problem(column.get(state), state):
            raise JudgeError(
                f"judge {name!r} returned {problem}",
                hint="return one number for each of state.response_ids",
            )
    return rest


def reward_turns(states: Sequence[RolloutState], reward: dict[str, Any]) -> None:
    """Take the `turn_rewards` out of a reward, and give them to the turns of these rollouts.

    Raises WireError if there are more or fewer turns.
    """
    given = reward.pop(TURN_REWARDS, None)
    if not isinstance(given, list):
        return
    turns = [(state, turn) for state in states for turn in state.turns()]
    if len(given) != len(turns):
        raise WireError(
            f"{len(given)} turn_rewards for {len(turns)} turns of the model",
            hint="give one number for each turn, in order",
        )
    for state in states:
        state.token_rewards = None
    for (state, turn), value in zip(turns, given, strict=True):
        state.reward_turn(turn, value)


def columns_of(state: RolloutState) -> dict[str, Any]:
    """Return the columns of a judged rollout, as a judge's answer has them."""
    found = {
        column.name: column.plain(column.get(state))
        for column in all_columns()
        if not column.is_large
    }
    return {name: plain for name, plain in found.items() if plain is not None}
