"""User code that skips the groups of even draws."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from buffer.errors import Skip
from buffer.ids import split_group_id
from buffer.wire.rollout import RolloutState
from producer_workers.agent_loops.environment import Answer, Turn
from producer_workers.agent_loops.single_turn import SingleTurnAgentLoop
from producer_workers.engines.base import Engine
from producer_workers.user_code.border import runs_inline

REASON = "the page of row is gone"


def skip_even(gid: Any) -> None:
    if split_group_id(gid)[1] % 2 == 0:
        raise Skip(REASON)


def judge(*, response: str, ground_truth: Any, state: RolloutState) -> float:
    skip_even(ground_truth)
    return 1.0


async def judge_async(*, response: str, ground_truth: Any, state: RolloutState) -> float:
    return judge(response=response, ground_truth=ground_truth, state=state)


def judge_group(*, states: Sequence[RolloutState]) -> list[float]:
    skip_even(states[-1].ground_truth)
    return [1.0] * len(states)


@runs_inline
def judge_quick(*, response: str, ground_truth: Any, state: RolloutState) -> float:
    return judge(response=response, ground_truth=ground_truth, state=state)


def is_valid(states: Sequence[RolloutState]) -> bool:
    skip_even(states[0].ground_truth)
    return True


class Loop(SingleTurnAgentLoop):
    async def generate_group(
        self, states: list[RolloutState], engine: Engine, gid: str
    ) -> list[RolloutState]:
        try:
            skip_even(gid)
        except Skip as skip:
            raise BaseExceptionGroup("of a task group", [ValueError("other"), skip]) from skip
        return await super().generate_group(states, engine, gid)


class Pages:
    async def answer(self, state: RolloutState, turn: Turn) -> Answer:
        raise Skip(REASON)


def look_up(page: str) -> str:
    """Return a page."""
    raise Skip(REASON)


def record(row: dict[str, Any]) -> dict[str, Any]:
    if row["answer"] % 2 == 0:
        raise Skip(REASON)
    return row


def record_always(row: dict[str, Any]) -> dict[str, Any]:
    raise Skip(f"row {row['answer']}")
