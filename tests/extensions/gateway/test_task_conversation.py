from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from producer_workers.judges.judge import FunctionJudge
from rolloutmq.extensions.gateway.agents import AgentTask
from tests.extensions.real_agents.scripted import call, chat_of
from tests.producer_workers.agents import TOOL, ask
from tests.producer_workers.recorder import Recorder, loop_of, questions, run

OTHER_TOOL: Any = {"type": "function", "function": {"name": "save", "parameters": {}}}
CALL = call("add", a=2, b=3)


def of(role: str, content: str) -> Any:
    return {"role": role, "content": content}


MAIN = [of("system", "You are an agent."), of("user", "context"), of("user", "2 + 3?")]
OTHER = of("system", "You are a housekeeper.")


def behind(number: int, *more: Any, system: Any = MAIN[0]) -> Any:
    """A request behind the answer to request `number`, with this system prompt."""
    return number, more, system


FIRST = (MAIN, [TOOL])
USER = of("user", "and now?")


@pytest.mark.parametrize(
    ("asked", "said", "judged", "others"),
    [
        pytest.param([FIRST], ["5"], 0, [], id="one answer"),
        pytest.param(
            [FIRST, (behind(0, USER, system=OTHER), [OTHER_TOOL])],
            ["5", "NOTHING"],
            0,
            [1],
            id="a memory after the answer",
        ),
        pytest.param(
            [FIRST, (behind(0, USER, system=OTHER), [OTHER_TOOL])],
            [CALL, "5"],
            1,
            [],
            id="another agent that answers a call",
        ),
        pytest.param(
            [([OTHER, of("user", "Title?"), MAIN[2]], None), FIRST],
            ["A sum", "5"],
            1,
            [0],
            id="a title before the first question",
        ),
        pytest.param(
            [FIRST, ([MAIN[0], of("user", "Add.")], [OTHER_TOOL]), (behind(0), [TOOL])],
            [CALL, "five", "5"],
            2,
            [1],
            id="a sub-agent with the same prompt",
        ),
        pytest.param(
            [FIRST, ([OTHER, of("user", "Add.")], [TOOL]), (behind(0), [TOOL])],
            [CALL, "five", "5"],
            2,
            [1],
            id="a sub-agent with the same tools",
        ),
        pytest.param(
            [
                FIRST,
                ([OTHER, of("user", "Sum up: 2 + 3?")], None),
                ([MAIN[0], of("user", "You had begun.")], [TOOL]),
            ],
            [CALL, "A sum is to be told.", "5"],
            2,
            [1],
            id="a summary by a prompt of its own",
        ),
        pytest.param(
            [
                FIRST,
                (behind(0, of("user", "Sum up.")), None),
                ([*MAIN, of("user", "Go on.")], [TOOL]),
            ],
            [CALL, "A sum is to be told.", "5"],
            2,
            [],
            id="a summary in the conversation",
        ),
        pytest.param(
            [FIRST, (behind(0, USER), None)], ["hm", "5"], 1, [], id="the last turn without tools"
        ),
        pytest.param(
            [FIRST, (behind(0, USER, system=None), [TOOL])],
            ["hm", "5"],
            1,
            [],
            id="instructions that were given once",
        ),
        pytest.param(
            [([of("user", "Plan: 2 + 3?")], None), ([of("user", "Plan: add. 2 + 3?")], None)],
            ["add", "5"],
            1,
            [],
            id="steps without a system prompt",
        ),
    ],
)
@pytest.mark.parametrize("train", ["task", "all"])
def test_the_last_turn_of_the_tasks_conversation_is_judged_and_others_are_context(
    tokenizer: Any,
    asked: Sequence[Any],
    said: list[str],
    judged: int,
    others: list[int],
    train: str,
) -> None:
    chat, answered = chat_of(tokenizer), list[Any]()

    async def solve(task: AgentTask) -> None:
        for messages, tools in asked:
            if isinstance(messages, tuple):
                number, more, system = messages
                before, turn = answered[number]
                results = [
                    {"role": "tool", "tool_call_id": each["id"], "content": "5"}
                    for each in turn.get("tool_calls") or ()
                ]
                messages = [*before[1:], turn, *results, *more]
                messages = [system, *messages] if system else messages
            reply = await ask(task, messages, **({"tools": tools} if tools else {}))
            answered.append((messages, reply.message.model_dump(exclude_none=True)))

    seen: list[str] = []

    def judge(*, response: str, **_: Any) -> float:
        seen.append(response)
        return 1.0

    engine = Recorder(chat, said)
    loop = loop_of(chat, agent=solve, judge=FunctionJudge("j", judge), train=train)
    states = run(loop, engine, questions("2 + 3?", max_tokens=10_000))
    assert [state.error for state in states] == [None] * len(states)
    assert [response.removeprefix("\ufffd") for response in seen] == [said[judged]]
    engine.check(states, others if train == "task" else ())
    assert {state.reward["score"] for state in states if state.reward} == {1.0}
    counts = states[0].extra.get("new_contexts", {})
    assert sum(n for why, n in counts.items() if why.startswith("other")) == len(others)
