"""Rows of NeMo Gym, by a stand-in that answers as the schema of its 0.7 says.

Its own package needs Python 3.13.14 and Ray. The agent here does what its `simple_agent` does: it
asks the model server at /ng-rollout/<id>/…/v1/responses until no function is called, and answers
the row, the response and the reward of its verifier.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import orjson
import pytest
from aiohttp import ClientSession, web

from buffer.errors import DatasetError
from buffer.wire.rollout import RolloutState, Status
from producer_workers.agent_loops.agent_loop import load_agent_loop
from producer_workers.config.task import TaskSection
from producer_workers.datasets.open import open_dataset
from tests.producer_workers.recorder import Recorder

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'

ADD = {
    "type": "function",
    "name": "add",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    "strict": True,
}


class Gym:
    """An agent's server; `capture` is the part of the path that Gym adds for token capture."""

    def __init__(self, model: Callable[[], str], capture: str) -> None:
        self._model = model
        self._capture = capture
        self.seen: list[dict[str, Any]] = []
        self.refusals: list[int] = []

    async def run(self, request: web.Request) -> web.Response:
        row = await request.json()
        if self.refusals:
            return web.Response(status=self.refusals.pop(), text="busy")
        self.seen.append(row)
        if row.get("fails"):
            return web.json_response({"detail": "the resources server is gone"}, status=500)
        where = f"{self._model()}/ng-rollout/{row['_ng_rollout_id']}{self._capture}/v1/responses"
        asked = dict(row["responses_create_params"])
        made: list[Any] = []
        async with ClientSession() as client:
            while True:
                body = {**asked, "input": [*asked["input"], *made]}
                async with client.post(where, json=body) as response:
                    answer = await response.json()
                    assert response.ok, answer
                made += answer["output"]
                calls = [item for item in answer["output"] if item["type"] == "function_call"]
                made += [
                    {"type": "function_call_output", "call_id": call["call_id"], "output": "5"}
                    for call in calls
                ]
                if not calls:
                    break
        text = "".join(
            part["text"] for item in made for part in item.get("content", ()) if "text" in part
        )
        verified = {**row, "response": {**answer, "output": made}}
        verified["reward"] = float(row["answer"] in text)
        verified["reward_components"] = row.get("components")
        if row.get("masked"):
            verified |= {"mask_sample": True, "failure_kind": "timeout", "reward": 0.0}
        return web.json_response(verified)


def rows(folder: Path, **changes: Any) -> Path:
    asked = {"input": [{"role": "user", "content": "2 + 3?"}], "tools": [ADD]}
    path = folder / "rows.jsonl"
    lines = [{"responses_create_params": asked, "answer": "5", **changes}]
    path.write_bytes(b"\n".join(map(orjson.dumps, lines)))
    return path


def play(
    chat: Any,
    path: Path,
    script: list[str],
    capture: str = "",
    *,
    refusals: Sequence[int] = (),
    opens: Callable[[], bool] = lambda: True,
) -> tuple[Any, Recorder, Gym]:
    """Play the row; the server listens once it `opens`, and first answers with the refusals."""
    engine = Recorder(chat, script)

    async def scene() -> list[RolloutState]:
        gym = Gym(lambda: str(loop._gateway.url).removesuffix("/v1"), capture)
        app = web.Application()
        app.router.add_post("/run", gym.run)
        runner = web.AppRunner(app)
        await runner.setup()
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        gym.refusals = [*refusals]

        async def listen() -> None:
            while not opens():
                await asyncio.sleep(0.05)
            await web.TCPSite(runner, "127.0.0.1", port).start()

        listening = asyncio.create_task(listen())
        if opens():
            await listening
        dataset = {"kind": "nemo_gym", "path": str(path), "url": f"http://127.0.0.1:{port}/"}
        section = TaskSection.model_validate({"judge": "environment", "dataset": dataset})
        problem = open_dataset(section.dataset, path.parent).row(0)
        loop: Any = load_agent_loop(
            section.loop("single_turn"),
            judge=None,
            tokenizer=chat,
            eos_ids=[chat.eos_token_id],
            options=section.loop_options("nemo_gym"),
        )
        state = RolloutState(messages=problem.messages, extra=problem.extra)
        try:
            gyms.append(gym)
            made: list[RolloutState] = await loop.generate_group([state], engine, "math-0000000001")
            return made
        finally:
            await listening
            await loop.close()
            await runner.cleanup()

    gyms: list[Gym] = []
    return asyncio.run(scene()), engine, gyms[0]


@pytest.mark.parametrize("capture", ["", "/training-token-capture"])
def test_a_row_is_run_by_an_agent_whose_model_is_the_gateway(
    chat: Any, tmp_path: Path, capture: str
) -> None:
    states, engine, gym = play(chat, rows(tmp_path), [CALL, "it is 5"], capture)
    assert [state.error for state in states] == [None]
    assert states[0].reward == {"score": 1.0}
    assert len(engine.said) == 2
    engine.check(states)
    (row,) = gym.seen
    assert row["answer"] == "5"


def test_components_stand_beside_the_reward_and_change_nothing_of_ours(
    chat: Any, tmp_path: Path
) -> None:
    path = rows(tmp_path, components={"score": 9.0, "style": 2.0})
    (state,), _, _ = play(chat, path, ["it is 5"])
    assert state.reward == {"score": 1.0, "style": 2.0}
    for components in ({"role": "other"}, {"turn_rewards": [1.0]}):
        (state,), _, _ = play(chat, rows(tmp_path, components=components), ["it is 5"])
        assert state.status is Status.FAILED
        assert "reward_components" in str(state.error)


def test_a_server_that_is_away_is_waited_for_and_fails_no_rollout(
    chat: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    (state,), engine, gym = play(chat, rows(tmp_path), ["it is 5"], refusals=[503, 429])
    assert (state.reward, state.error) == ({"score": 1.0}, None)
    assert (len(gym.seen), len(engine.said)) == (1, 1)
    assert "status 429: busy; rollouts wait" in caplog.text
    caplog.clear()
    (state,), _, _ = play(
        chat, rows(tmp_path), ["it is 5"], opens=lambda: "rollouts wait" in caplog.text
    )
    assert (state.reward, state.error) == ({"score": 1.0}, None)


def test_faults_of_the_gym_fail_the_rollout(chat: Any, tmp_path: Path) -> None:
    for changes in ({"fails": True}, {"masked": True}):
        (state,), _, _ = play(chat, rows(tmp_path, **changes), ["it is 5"])
        assert state.status is Status.FAILED
        assert ("gone" if "fails" in changes else "timeout") in str(state.error)


def test_a_line_that_is_no_row_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "2 + 3?"}\n')
    dataset = {"kind": "nemo_gym", "path": str(path), "url": "http://127.0.0.1:1"}
    section = TaskSection.model_validate({"judge": "environment", "dataset": dataset})
    with pytest.raises(DatasetError, match=r"rows\.jsonl:1.*responses_create_params"):
        open_dataset(section.dataset, tmp_path)
