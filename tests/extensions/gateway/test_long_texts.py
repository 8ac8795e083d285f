from __future__ import annotations

import asyncio
import io
import threading
from typing import Any

import pytest

from producer_workers.agent_loops.environment import Answer
from producer_workers.agent_loops.multi_turn import MultiTurnAgentLoop
from producer_workers.agent_loops.tokenizer import BYTES_PER_TOKEN, LONG_TEXT, load_tokenizer
from rolloutmq.extensions.gateway.server import MOST_VALUES
from tests.extensions.gateway.test_gateway_endpoint import CHAT, Desk, at_desk
from tests.producer_workers.agent_loops.test_multi_turn import TalkingEngine, rollout
from tests.producer_workers.agent_loops.test_multi_turn import run as run_loop
from tests.producer_workers.recorder import Recorder

CONTEXT = 200


class Watched:
    """A tokenizer that notes how long the longest text is, and holds long ones until it is told to go on."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.longest = 0
        self.holds = False
        self.is_holding = threading.Event()
        self.may_go_on = threading.Event()

    def apply_chat_template(self, messages: Any, **options: Any) -> Any:
        self.note(sum(len(str(message["content"])) for message in messages))
        return self.tokenizer.apply_chat_template(messages, **options)

    def encode(self, text: str, **options: Any) -> Any:
        self.note(len(text))
        return self.tokenizer.encode(text, **options)

    def note(self, size: int) -> None:
        self.longest = max(self.longest, size)
        if self.holds and size > LONG_TEXT:
            self.is_holding.set()
            assert self.may_go_on.wait(60)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)


def said(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


def test_a_short_text_is_read_while_a_long_one_is(chat: Any) -> None:
    watched = Watched(chat)

    async def scene(desk: Desk) -> None:
        watched.holds = True
        long = asyncio.create_task(desk.ask(said("x" * (LONG_TEXT + 1))))
        await asyncio.to_thread(watched.is_holding.wait, 60)
        assert (await desk.ask(said("hi")))[0] == 200
        assert not long.done()
        watched.may_go_on.set()
        assert (await long)[0] == 200

    at_desk(watched, Recorder(chat), scene, max_tokens=10_000)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, said("x" * (BYTES_PER_TOKEN * CONTEXT))),
        (CHAT, said("é" * (BYTES_PER_TOKEN * CONTEXT // 2))),
        (CHAT, said("x") | {"tools": [{"f": {"x" * BYTES_PER_TOKEN * CONTEXT: 1}}]}),
        ("completions", {"prompt": "x" * (BYTES_PER_TOKEN * CONTEXT + 1)}),
        ("completions", {"prompt": [7] * CONTEXT}),
    ],
    ids=["ASCII", "two bytes", "a key of a tool", "raw text", "tokens"],
)
def test_a_text_that_cannot_fit_is_refused_before_it_is_encoded(
    chat: Any, path: str, body: dict[str, Any]
) -> None:
    watched, engine = Watched(chat), Recorder(chat)
    engine.max_model_len = CONTEXT

    async def scene(desk: Desk) -> None:
        status, error = await desk.ask(body, path)
        assert (status, error["code"]) == (400, "context_length_exceeded")
        assert desk.session.truncation == error["message"]
        assert watched.longest < 100
        assert (await desk.ask(said("x" * 50)))[0] == 200, "a shorter one fits"

    at_desk(watched, engine, scene, max_tokens=10_000)


def test_a_request_of_very_many_values_is_refused_before_it_is_parsed(chat: Any) -> None:
    """Their objects are made in one call, in which all other threads wait: 32 MiB of them took 30 s."""
    bodies = [
        b'{"a":[' + b"[]," * (MOST_VALUES // 4) + b"[]]}",
        b'{"a":[' + b"1," * MOST_VALUES + b"1]}",
    ]

    async def scene(desk: Desk) -> None:
        for body in bodies:
            url, headers = f"{desk.gateway.url}/{CHAT}", {"Authorization": f"Bearer {desk.key}"}
            async with desk.http.post(url, data=io.BytesIO(body), headers=headers) as reply:
                assert reply.status == 413
                assert (await reply.json())["error"]["code"] == "request_too_large"
        assert (await desk.ask(said(",[{" * 1000)))[0] == 200

    at_desk(chat, Recorder(chat), scene, max_tokens=10_000)


def test_an_answer_of_an_environment_that_cannot_fit_ends_the_conversation_unread(
    chat: Any,
) -> None:
    class Endless:
        async def answer(self, *_: Any) -> Answer:
            return Answer([{"role": "user", "content": "x" * 2_000_000}])

    watched = Watched(chat)
    common: Any = {"judge": None, "tokenizer": watched, "eos_ids": [chat.eos_token_id]}
    loop = MultiTurnAgentLoop(environment=Endless(), **common)
    (state,) = run_loop(loop, TalkingEngine(chat, ["one", "two"]), [rollout(max_tokens=1000)])
    assert (len(state.turns()), state.finish_reason) == (1, "length")
    assert watched.longest < 100


def test_a_loaded_tokenizer_is_changed_by_no_use(tokenizer: Any, tmp_path: Any) -> None:
    """Two threads use it, and unsetting a limit that its file sets would fail the other one."""
    tokenizer.save_pretrained(tmp_path)
    file = tmp_path / "tokenizer.json"
    limit = '"truncation": {"direction": "Right", "max_length": 9, "strategy": "LongestFirst", "stride": 0}'
    file.write_text(file.read_text().replace('"truncation": null', limit))
    backend: Any = load_tokenizer(str(tmp_path)).backend_tokenizer  # type: ignore[attr-defined]
    assert (backend.truncation, backend.padding) == (None, None)
