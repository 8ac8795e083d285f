"""Tools that hang, in a toolbox and in a whole run: no later call suffers for it."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from buffer.errors import ProcessUnavailable
from buffer.wire.rollout import FIRST_WEIGHTS, PolicyVersion, ToolCall, VersionSpan
from buffer.wire.sampling import SampleParams
from producer_workers.agent_loops.toolbox import Toolbox, python_tool
from producer_workers.engines.base import Generation
from producer_workers.user_code.user_process import REPLACED
from rolloutmq import rehearse
from rolloutmq.testing import END, Characters, RehearsalError
from tests.producer_workers.letter_engine import LetterEngine
from tests.producer_workers.user_code import deeds
from tests.producer_workers.user_code.test_containment import MINE

LIMIT_S = 0.5


def asked(deed: str) -> ToolCall:
    return ToolCall(id="0", name="tool", arguments={"deed": deed})


@pytest.mark.parametrize("hung", [16, 40])
@pytest.mark.parametrize("tool", [f"{MINE}:tool", deeds.tool], ids=["named", "given"])
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


class Caller(LetterEngine):
    """Calls the tool with the problem's text first, then repeats what it was told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    async def generate(
        self, request_id: str, prompt_ids: NDArray[np.int32], params: SampleParams
    ) -> Generation:
        await asyncio.sleep(0)
        asked, _, told = Characters().decode(prompt_ids.tolist()).strip().partition("<tool_call>")
        text = "ok"
        if told:
            self.told.append(told.partition("</tool_call>")[2].strip()[:5])
        else:
            text = f'<tool_call>{{"name":"tool","arguments":{{"deed":"{asked}"}}}}</tool_call>'
        ids = np.array([*Characters().encode(text), END], "<i4")
        spans = (VersionSpan(0, len(ids), FIRST_WEIGHTS.version, FIRST_WEIGHTS.lineage),)
        return Generation(ids, np.full(len(ids), -0.5, "<f4"), spans, "stop")

    def version(self) -> PolicyVersion:
        return FIRST_WEIGHTS


def test_a_run_goes_on_beside_and_after_hung_tools() -> None:
    engine = Caller()
    problems = [{"question": deed, "answer": ""} for deed in ["waits"] * 16 + ["fine"] * 4]
    options = {"tools": [f"{MINE}:tool"], "call_timeout_s": LIMIT_S, "processes": 4}
    REPLACED.clear()
    groups = rehearse(
        problems,
        judge=lambda **_: 1.0,
        agent_loop="tools",
        agent_loop_options=options,
        engine=engine,
        samples=1,
        timeout_s=400.0,
    )
    assert len(groups) == 20
    assert sorted(engine.told) == ["error"] * 16 + ["well "] * 4
    assert REPLACED["tool 'tool'"] == 16


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
