from __future__ import annotations

import asyncio
import sys
from typing import Any

import pytest

from buffer.errors import ProcessUnavailable
from buffer.wire.rollout import ToolCall
from producer_workers.agent_loops.toolbox import Toolbox, python_tool
from rolloutmq import rehearse
from rolloutmq.testing import RehearsalError
from tests.producer_workers.user_code import deeds
from tests.producer_workers.user_code.test_containment import MINE

LIMIT_S = 0.5


def asked(deed: str) -> ToolCall:
    return ToolCall(id="0", name="tool", arguments={"deed": deed})


@pytest.mark.parametrize("hung", [16, pytest.param(40, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "tool", [pytest.param(f"{MINE}:tool", id="named", marks=pytest.mark.slow), deeds.tool]
)
def test_a_call_after_any_number_of_hung_ones_is_answered(tool: Any, hung: int) -> None:
    async def scene() -> tuple[set[str], list[str]]:
        toolbox = Toolbox([tool], call_timeout_s=LIMIT_S)
        try:
            async with asyncio.timeout(400):
                told = await toolbox.call_all([asked("waits")] * hung)
                return set(told), await toolbox.call_all([asked("fine")] * 3)
        finally:
            await toolbox.close()

    told, after = asyncio.run(scene())
    assert told == {f"error: tool took longer than {LIMIT_S:g} s"}
    assert after == ["well done"] * 3


async def test_a_tool_that_cannot_be_called_is_no_answer_to_a_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No process can be started, too many threads hang, or there is no sandbox."""
    monkeypatch.setattr("producer_workers.user_code.user_function.MOST_ABANDONED", 0)
    given = Toolbox([deeds.tool], call_timeout_s=0.1)
    await given.call_all([asked("waits")] * 16)
    named = Toolbox([f"{MINE}:tool"])
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    service = Toolbox([python_tool("http://127.0.0.1:1")])
    monkeypatch.setattr("producer_workers.user_code.sandbox.RETRIES", 0)
    program = ToolCall(id="0", name="python", arguments={"code": "print(1)"})
    for toolbox, call in ((given, asked("fine")), (named, asked("fine")), (service, program)):
        with pytest.raises(ProcessUnavailable):
            await toolbox.call_all([call])


@pytest.mark.parametrize("is_task", [False, True])
# the log of RuntimeError's half of a surrogate cannot be sent by xdist
@pytest.mark.parametrize("name", sorted({*deeds.RAISED} - {"RuntimeError"}))
def test_what_an_agent_loop_raises_fails_its_group_and_not_its_worker(
    name: str, is_task: bool
) -> None:
    class Loop:
        def __init__(self, **_: Any) -> None:
            pass

        async def generate_group(self, states: Any, engine: Any, gid: str) -> Any:
            return await (asyncio.create_task(self.deed()) if is_task else self.deed())

        async def deed(self) -> Any:
            return deeds.do(name, 0)

    problems = [{"question": "?", "answer": ""}]
    with pytest.raises(RehearsalError, match="failed this group") as caught:
        rehearse(problems, judge=lambda **_: 1.0, agent_loop=Loop, samples=1)
    assert name in str(caught.value)
