from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from buffer.errors import ConfigError, ProcessUnavailable
from buffer.wire.rollout import RolloutState, Status, ToolCall
from producer_workers.agent_loops.environment import Answer, Turn
from producer_workers.agent_loops.multi_turn import MultiTurnAgentLoop
from producer_workers.agent_loops.toolbox import Toolbox, tool_schemas
from tests.producer_workers.agent_loops.test_multi_turn import (
    TalkingEngine,
    chat,
    loop_of,
    rollout,
    run,
)

__all__ = ["chat"]

SUMS = [sys.executable, str(Path(__file__).with_name("mcp_sums.py"))]


def call(name: str, **arguments: Any) -> ToolCall:
    return ToolCall(id="call_0", name=name, arguments=arguments)


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


# -- MCP ---------------------------------------------------------------------


def test_tools_of_an_mcp_server_are_offered_called_and_survive_its_death() -> None:
    names = [schema["function"]["name"] for schema in tool_schemas([add], [SUMS])]
    assert names == ["add", "multiply"]

    async def scene() -> list[list[str]]:
        # as a worker does: within a loop
        toolbox = Toolbox([add], mcp=[SUMS])
        together = await toolbox.call_all(
            [call("add", a=2, b=3), call("multiply", a=2, b=3), call("multiply", a=4, b=5)]
        )
        refused = await toolbox.call_all([call("multiply", a=-1, b=1), call("divide")])
        died = await toolbox.call_all([call("multiply", a=13, b=1)])
        again = await toolbox.call_all([call("multiply", a=7, b=8)])
        await toolbox.close()
        return [together, refused, died, again]

    together, refused, died, again = asyncio.run(scene())
    assert together == ["5", "6", "20"]
    assert refused == [
        "error: McpError: only positive ones",
        "error: there is no tool 'divide'; known: add, multiply",
    ]
    assert died[0].startswith("error: McpError: MCP server")
    assert again == ["56"]


async def test_calls_of_other_groups_go_on_beside_a_refused_one_and_end_with_their_server() -> None:
    toolbox = Toolbox([], mcp=[SUMS], call_timeout_s=400.0)
    pending = asyncio.create_task(toolbox.call_all([call("multiply", a=14, b=1)] * 2))
    (refused,) = await toolbox.call_all([call("multiply", a=15, b=1)])
    assert refused.startswith("error: McpError: MCP server")
    assert await toolbox.call_all([call("multiply", a=2, b=3)]) == ["6"]
    assert not pending.done(), "the server lives: its answer may come yet"
    await toolbox.call_all([call("multiply", a=13, b=1)])
    async with asyncio.timeout(400):
        assert all(told.startswith("error: McpError: MCP server") for told in await pending)
    fresh = await asyncio.gather(
        *(toolbox.call_all([call("multiply", a=n, b=2)]) for n in range(5))
    )
    assert fresh == [[str(2 * n)] for n in range(5)]
    await toolbox.close()


async def test_a_server_that_hangs_is_replaced_and_one_that_cannot_start_is_no_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("producer_workers.agent_loops.mcp_server.ALIVE_S", 0.5)
    toolbox = Toolbox([], mcp=[SUMS], call_timeout_s=1.0)
    for _ in range(2):
        (told,) = await toolbox.call_all([call("multiply", a=16, b=1)])
        assert told == "error: multiply took longer than 1 s"
        (server,) = set(toolbox._servers.values())
        assert server._connection is None
    toolbox._timeout_s = 60.0
    assert await toolbox.call_all([call("multiply", a=2, b=3)]) == ["6"]
    await toolbox.close()
    server._command = ["/nowhere/server"]
    with pytest.raises(ProcessUnavailable):
        await toolbox.call_all([call("multiply", a=2, b=3)])


def test_a_server_that_is_none_is_told_when_the_loop_is_made() -> None:
    with pytest.raises(ConfigError, match="does not answer"):
        Toolbox([], mcp=[[sys.executable, "-c", ""]])
    with pytest.raises(ConfigError, match="same name"):
        Toolbox(["tests.producer_workers.agent_loops.test_environments:multiply"], mcp=[SUMS])


def multiply(a: int, b: int) -> int:
    """Another one."""
    return a * b


# -- Python ------------------------------------------------------------------


def test_a_model_runs_python_and_reads_what_it_prints(chat: Any) -> None:
    program = (
        '<tool_call>{"name": "python", "arguments": {"code": "print(6 * 7); 1 / 0"}}</tool_call>'
    )
    (state,) = run(
        loop_of(chat, tools=["python"], sandbox="weak"),
        TalkingEngine(chat, [program, "42"]),
        [rollout()],
    )
    assert "42\nerror: ZeroDivisionError: division by zero" in chat.decode(state.response_ids)
    assert state.status is Status.COMPLETED


# -- the README --------------------------------------------------------------


def test_tools_and_environment_in_the_readme_work_as_written(
    chat: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, readme_block: Callable[[str], str]
) -> None:
    for name in ("my_tools.py", "my_game.py"):
        (tmp_path / name).write_text(readme_block(name), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    search = '<tool_call>{"name": "search", "arguments": {"query": "cats"}}</tool_call>'
    (state,) = run(
        loop_of(chat, tools=["my_tools:search"]), TalkingEngine(chat, [search, "5"]), [rollout()]
    )
    assert '["a page about cats"]' in chat.decode(state.response_ids)

    common: dict[str, Any] = {"judge": None, "tokenizer": chat, "eos_ids": [chat.eos_token_id]}
    state = rollout()
    state.ground_truth = "5"
    loop = MultiTurnAgentLoop(environment="my_game:Game", **common)
    (state,) = run(loop, TalkingEngine(chat, ["3", "5"]), [state])
    assert state.reward == {"score": 0.5}
    assert "No. Try again." in chat.decode(state.response_ids)


class Riddle:
    """Ends a conversation, with a score, at the right answer only."""

    async def answer(self, state: RolloutState, turn: Turn) -> Answer:
        right = turn.text.startswith("5")
        return (
            Answer(reward={"score": 1.0}) if right else Answer([{"role": "user", "content": "?"}])
        )


@pytest.mark.parametrize(
    ("limits", "options", "score"),
    [({}, {}, 1.0), ({"max_tokens": 1}, {}, 0.0), ({}, {"max_turns": 1}, 0.0)],
)
def test_a_conversation_that_a_limit_ends_without_a_score_has_score_0(
    chat: Any, limits: dict[str, int], options: dict[str, Any], score: float
) -> None:
    loop = MultiTurnAgentLoop(
        environment=Riddle(), judge=None, tokenizer=chat, eos_ids=[chat.eos_token_id], **options
    )
    (state,) = run(loop, TalkingEngine(chat, ["3 or 4", "5"]), [rollout(**limits)])
    assert (state.status, state.reward) == (Status.COMPLETED, {"score": score})


class Graded:
    """Rewards each turn with its number, and ends after the third."""

    async def answer(self, state: RolloutState, turn: Turn) -> Answer:
        more = [] if turn.number == 2 else [{"role": "user", "content": "go on"}]
        grade: Any = "bad" if turn.text.startswith("bad") else turn.number + 1
        return Answer(more, reward={"score": 1.0}, turn_reward=grade)


def test_an_environment_rewards_turns_also_where_a_rollout_was_cut_off(chat: Any) -> None:
    loop = MultiTurnAgentLoop(
        environment=Graded(),
        judge=None,
        tokenizer=chat,
        eos_ids=[chat.eos_token_id],
        partial_rollout=True,
    )
    turns = ["one", "two", "three"]
    (whole,) = run(loop, TalkingEngine(chat, turns), [rollout()])
    expected = [(float(n), turn.stop - 1) for n, turn in enumerate(whole.turns(), 1)]
    assert whole.token_rewards is not None
    assert [(float(whole.token_rewards[n]), n) for n in np.flatnonzero(whole.token_rewards)] == (
        expected
    )
    for cut in range(len(whole.response_ids)):
        engine = TalkingEngine(chat, turns)
        engine.abort_at = cut
        (state,) = run(loop, engine, [rollout()])
        (state,) = run(loop, TalkingEngine(chat, turns), [state])
        assert state.token_rewards is not None
        assert state.token_rewards.tolist() == whole.token_rewards.tolist()
    (state,) = run(loop, TalkingEngine(chat, ["bad"]), [rollout()])
    assert state.status is Status.FAILED


def test_an_environment_whose_answer_ends_with_the_assistant_fails_its_rollout(chat: Any) -> None:
    class Speaker:
        async def answer(self, state: RolloutState, turn: Turn) -> Answer:
            return Answer(
                [{"role": "user", "content": "go"}, {"role": "assistant", "content": "I"}]
            )

    loop = MultiTurnAgentLoop(
        environment=Speaker(), judge=None, tokenizer=chat, eos_ids=[chat.eos_token_id]
    )
    (state,) = run(loop, TalkingEngine(chat, ["one", "two"]), [rollout()])
    assert state.status is Status.FAILED
    assert "end with the assistant's" in (state.error or "")
