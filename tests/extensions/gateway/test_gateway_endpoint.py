"""Test the gateway's endpoint with hostile and careless agents.

Every answer is one that OpenAI's clients know, nothing outlives the session, and no session samples
more than it has.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import openai
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from buffer.wire.rollout import PolicyVersion, RolloutState, Status
from buffer.wire.sampling import SampleParams, StructuredOutput
from producer_workers.agent_loops.chat_delta import ChatDelta
from producer_workers.agent_loops.tool_parsers import HermesParser
from producer_workers.config.distribution import Fixed
from producer_workers.config.engine import SimulatedConfig
from producer_workers.engines.simulated import SimulatedEngine
from producer_workers.judges.judge import Judge
from rolloutmq.extensions.gateway import server, session
from rolloutmq.extensions.gateway.agent_sessions import AgentSessions
from rolloutmq.extensions.gateway.agents import AgentTask
from rolloutmq.extensions.gateway.server import Gateway
from rolloutmq.extensions.gateway.session import Session
from rolloutmq.extensions.gateway.turn import TokenBudget
from tests.producer_workers.recorder import Recorder, loop_of, questions

USER = [{"role": "user", "content": "x"}]
GENEROUS_S = 400.0


class Desk:
    """One session behind a gateway, and its client.

    `ask` returns (status, the error's message or the answer).
    """

    def __init__(self, gateway: Gateway, session: Session, http: aiohttp.ClientSession) -> None:
        self.gateway = gateway
        self.session = session
        self.http = http
        self.key = gateway.admit(AgentSessions(lambda *_: session))

    async def ask(
        self, body: Any, path: str = "chat/completions", **headers: str
    ) -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {self.key}", **headers}
        data = body if isinstance(body, bytes) else orjson.dumps(body)
        async with self.http.post(
            f"{self.gateway.url}/{path}", data=data, headers=headers
        ) as reply:
            said = orjson.loads(await reply.read())
        if reply.status == 200:
            return 200, said
        assert set(said) == {"error"}
        assert set(said["error"]) == {"message", "type", "code", "param"}
        assert said["error"]["type"] == (
            "server_error" if reply.status >= 500 else "invalid_request_error"
        )
        return reply.status, said["error"]


def at_desk(
    chat: Any, engine: Any, scene: Callable[[Desk], Awaitable[None]], **params: Any
) -> Session:
    """Play `scene` against a session of `params`; returns that session."""

    @asynccontextmanager
    async def open_desk() -> AsyncIterator[Desk]:
        delta = ChatDelta(chat, [chat.eos_token_id])
        sampling = SampleParams(**params)
        made = Session("g/0", engine, chat, delta, [chat.eos_token_id], sampling, HermesParser())
        gateway = Gateway()
        await gateway.start()
        try:
            async with aiohttp.ClientSession() as http:
                yield Desk(gateway, made, http)
        finally:
            await gateway.close()

    async def play() -> Session:
        async with asyncio.timeout(GENEROUS_S), open_desk() as desk:
            await scene(desk)
        return desk.session

    return asyncio.run(play())


async def until(true: Callable[[], bool]) -> None:
    while not true():
        await asyncio.sleep(0.005)


CHAT = "chat/completions"
TEXT = "completions"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        (CHAT, b"", "Invalid JSON"),
        (CHAT, b"[1]", "object"),
        (CHAT, b"\xff\xfe{}", "Invalid JSON"),
        (CHAT, b"[" * 100_000, "Invalid JSON"),
        (CHAT, {}, "messages: "),
        (CHAT, {"messages": []}, "messages: "),
        (CHAT, {"messages": [{"content": "x"}]}, "has a role"),
        (CHAT, {"messages": [{"role": 5, "content": "x"}]}, "role, name, tool_call_id"),
        (CHAT, {"messages": [{"role": "poet", "content": "x"}]}, "no such role: poet"),
        (CHAT, {"messages": [{"role": "user", "content": {"a": 1}}]}, "only text"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "only text"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": None}]}]}, "only text"),
        (CHAT, {"messages": [{"role": "assistant", "tool_calls": 5}]}, "tool_calls is a list"),
        (CHAT, {"messages": [{"role": "assistant", "tool_calls": ["x"]}]}, "has an id"),
        (CHAT, {"messages": [{"role": "user", "content": 5}] * 1000}, "only text"),
        (CHAT, {"messages": [*USER, {"role": "assistant", "content": "I"}]}, "ends with a message"),
        (CHAT, {"messages": USER, "n": 2}, "n: "),
        (CHAT, {"messages": USER, "max_tokens": 0}, "max_tokens: "),
        (CHAT, {"messages": USER, "stop": ""}, "stop."),
        (CHAT, {"messages": USER, "stop": ["a"] * 17}, "stop."),
        (CHAT, {"messages": USER, "tool_choice": "required"}, "tool_choice: "),
        (CHAT, {"messages": USER, "functions": [{"name": "f"}]}, "functions: offer tools"),
        (CHAT, {"messages": USER, "logprobs": True, "top_logprobs": 5}, "top_logprobs: only"),
        (CHAT, {"messages": USER, "chat_template_kwargs": {"enable_thinking": False}}, "of the task"),
        (CHAT, {"messages": USER, "response_format": {"type": "grammar"}}, "response_format: "),
        (CHAT, {"messages": USER, "response_format": {"type": "json_schema"}}, "json_schema with its schema"),
        (
            CHAT,
            {"messages": USER, "response_format": {"type": "json_object"}},
            "letters cannot produce structured output",
        ),
        (TEXT, {"prompt": ""}, "prompt"),
        (TEXT, {"prompt": [2**40]}, "prompt"),
        (TEXT, {"prompt": ["a", "b"]}, "one prompt at a time"),
        (TEXT, {"prompt": "a", "best_of": 3}, "best_of: "),
        (TEXT, {"prompt": "a", "echo": True}, "echo: "),
        (TEXT, {"prompt": "a", "suffix": "b"}, "suffix: "),
    ],
)  # fmt: skip
def test_what_cannot_be_recorded_is_refused_and_the_session_goes_on(
    chat: Any, path: str, body: Any, said: str
) -> None:
    engine = Recorder(chat)

    async def scene(desk: Desk) -> None:
        status, error = await desk.ask(body, path)
        assert (status, engine.said) == (400, [])
        assert said in error["message"]
        assert len(error["message"]) < 5000, "not every fault of a request that has a million"
        empty: dict[str, Any] = {"n": None, "stream": None, "tools": [], "top_logprobs": 0}
        assert (await desk.ask({"messages": USER, **empty}))[0] == 200

    assert len(at_desk(chat, engine, scene).segments) == 1


@pytest.mark.parametrize(
    ("path", "headers", "body", "status", "said"),
    [
        (CHAT, {"Authorization": "Bearer rmq-guessed"}, {"messages": USER}, 401, "belongs to no session"),
        (CHAT, {"Authorization": "\udcff\udcfe"}, {"messages": USER}, 401, "belongs to no session"),
        (CHAT, {"Authorization": ""}, b"{", 401, "belongs to no session"),
        (CHAT, {"Content-Encoding": "gzip"}, b"no gzip", 400, "content-encoding"),
        (CHAT, {}, {"messages": [{"role": "user", "content": "x" * 4096}]}, 413, "2048 bytes at most"),
        ("embeddings", {}, {"input": "x"}, 404, "there are POST /v1/chat/completions"),
    ],
)  # fmt: skip
def test_errors_of_every_kind_are_said_as_openai_says_them(
    chat: Any,
    path: str,
    headers: Any,
    body: Any,
    status: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server, "LARGEST_REQUEST", 2048)

    async def scene(desk: Desk) -> None:
        got, error = await desk.ask(body, path, **headers)
        assert got == status
        assert said in error["message"]

    assert at_desk(chat, Recorder(chat), scene).segments == []


def test_a_fault_of_the_tokenizer_is_told_and_logged(
    chat: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def scene(desk: Desk) -> None:
        chat.decode = lambda *_, **__: 1 / 0
        status, error = await desk.ask({"messages": USER})
        assert (status, error["code"]) == (500, "internal_error")
        assert "ZeroDivisionError" in error["message"]

    at_desk(chat, Recorder(chat), scene)
    assert "a request of an agent failed" in caplog.text


@pytest.mark.parametrize("stream", [False, True])
def test_an_agent_that_hangs_up_ends_its_request_in_the_engine_and_nothing_of_it_is_trained(
    chat: Any, stream: bool
) -> None:
    engine = Recorder(chat)
    engine.hangs = True

    async def scene(desk: Desk) -> None:
        asking = asyncio.create_task(desk.ask({"messages": USER, "stream": stream}))
        await until(lambda: len(engine.requests) == 1)
        asking.cancel()
        await until(lambda: engine.cancelled == 1)
        engine.hangs = False
        assert (await desk.ask({"messages": USER}))[0] == 200
        assert engine.requests[1][2].max_tokens == 40, "what it did not sample is there again"

    (segment,) = at_desk(chat, engine, scene, max_tokens=40).segments
    assert int(segment.mask.sum()) == len(engine.said[0].token_ids)


def test_what_an_ended_agent_left_behind_is_not_sampled(chat: Any) -> None:
    engine = Recorder(chat)
    late: list[BaseException] = []
    left: list[asyncio.Task[None]] = []

    async def leaves_one_behind(task: AgentTask) -> None:
        client = openai.AsyncOpenAI(base_url=task.base_url, api_key=task.api_key, max_retries=0)
        ask: Any = client.chat.completions.create
        await ask(model="any", messages=USER)

        async def asks_on() -> None:
            while True:
                try:
                    await ask(model="any", messages=USER)
                except openai.OpenAIError as error:
                    late.append(error)

        engine.hangs = True
        left.append(asyncio.create_task(asks_on()))
        await until(lambda: len(engine.requests) == 2)

    async def scene() -> list[RolloutState]:
        loop = loop_of(chat, leaves_one_behind, judge=Slow(lambda: len(late) >= 3))
        made = await loop.generate_group(questions("x"), engine, "math-0000000001")
        left[0].cancel()
        return made

    (state,) = asyncio.run(scene())
    assert (state.status, engine.cancelled, len(engine.requests)) == (Status.COMPLETED, 1, 2)
    assert isinstance(late[-1], openai.AuthenticationError)
    engine.check([state])


class Slow(Judge):
    """A judge that waits."""

    name = "slow"

    def __init__(self, true: Callable[[], bool]) -> None:
        self.true = true

    async def ask(self, states: Sequence[RolloutState]) -> list[dict[str, float]]:
        await until(self.true)
        return [{"score": 1.0}]


def test_a_response_format_is_kept_to_where_the_engine_can_and_the_task_has_none(chat: Any) -> None:
    engine: Any = Recorder(chat)
    engine.structures_output = True
    asked = {"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": SCHEMA}}

    async def scene(desk: Desk) -> None:
        for kind in (asked, {"type": "json_object"}, {"type": "text"}):
            assert (await desk.ask({"messages": USER, "response_format": kind}))[0] == 200
        assert (await desk.ask({"prompt": "x", "response_format": asked}, TEXT))[0] == 200

    async def refused(desk: Desk) -> None:
        status, error = await desk.ask({"messages": USER, "response_format": asked})
        assert status == 400
        assert "already sets a structure" in error["message"]

    at_desk(chat, engine, scene)
    whole = StructuredOutput(json_schema=SCHEMA)
    given_to_engine = [params.structured for *_, params in engine.requests]
    assert given_to_engine == [whole, StructuredOutput(json_schema={"type": "object"}), None, whole]
    at_desk(chat, engine, refused, structured=StructuredOutput(choice=["a"]))


def test_a_session_has_a_bound_of_contexts(chat: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "MOST_SEGMENTS", 3)

    async def scene(desk: Desk) -> None:
        bodies = [{"messages": [{"role": "user", "content": str(n)}]} for n in range(8)]
        answers = await asyncio.gather(*(desk.ask(body) for body in bodies))
        assert {status for status, _ in answers} == {200, 400}
        place = next(n for n, (status, _) in enumerate(answers) if status == 200)
        said = answers[place][1]["choices"][0]["message"]
        messages = [
            *bodies[place]["messages"],
            {"role": "assistant", "content": said["content"]},
            *USER,
        ]
        while len(desk.session.segments) < 3:
            await desk.ask(
                {"messages": [{"role": "user", "content": f"more {len(desk.session.segments)}"}]}
            )
        status, error = await desk.ask({"messages": [{"role": "user", "content": "one too many"}]})
        assert (status, error["code"]) == (400, "refused")
        assert "3 contexts, the limit" in error["message"]
        assert (await desk.ask({"messages": messages}))[0] == 200, "an old one goes on"

    assert len(at_desk(chat, Recorder(chat), scene).segments) == 3


def test_a_chat_does_not_go_on_behind_a_text_by_naming_its_role(chat: Any) -> None:
    chat.chat_template = chat.chat_template.replace("'system'", "'system', 'raw'")

    async def scene(desk: Desk) -> None:
        text = (await desk.ask({"prompt": "x"}, TEXT))[1]["choices"][0]["text"]
        assert (await desk.ask({"messages": [{"role": "raw", "content": "x" + text}, *USER]}))[
            0
        ] == 200

    assert len(at_desk(chat, Recorder(chat), scene).segments) == 2


# -- the budget --------------------------------------------------------------


def test_requests_at_the_same_time_share_the_tokens_of_their_session(chat: Any) -> None:
    engine = Recorder(chat)

    async def scene(desk: Desk) -> None:
        asks = [
            desk.ask({"messages": USER, "max_tokens": 9} if n % 2 else {"messages": USER})
            for n in range(30)
        ]
        answers = await asyncio.gather(*asks)
        refused = [error["code"] for status, error in answers if status != 200]
        assert set(refused) == {"context_length_exceeded"}

    at_desk(chat, engine, scene, max_tokens=40)
    assert sum(len(made.token_ids) for made in engine.said) == 40


Plan = tuple[int | None, int, int, bool]
PLANS = st.tuples(
    st.none() | st.integers(1, 20), st.integers(0, 20), st.integers(0, 6), st.booleans()
)


@given(st.integers(1, 40), st.lists(PLANS, max_size=12))
def test_no_order_of_requests_samples_more_than_there_is_and_none_waits_for_ever(
    total: int, plans: list[Plan]
) -> None:
    running: dict[int, int] = {}
    sampled = 0

    async def request(budget: TokenBudget, number: int, plan: Plan) -> None:
        nonlocal sampled
        wanted, uses, steps, _ = plan
        async with budget.reserve(wanted) as allowed:
            assert allowed <= (wanted or total)
            running[number] = allowed
            assert sampled + sum(running.values()) <= total
            try:
                for _ in range(steps):
                    await asyncio.sleep(0)
                budget.spend(min(uses, allowed))
                sampled += min(uses, allowed)
            finally:
                del running[number]

    async def scene() -> None:
        budget = TokenBudget(total)
        tasks = [
            asyncio.create_task(request(budget, number, plan)) for number, plan in enumerate(plans)
        ]
        for step in range(3):
            await asyncio.sleep(0)
            for task, plan in zip(tasks, plans, strict=True):
                if plan[3] and plan[2] % 3 == step:
                    task.cancel()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(result is None or isinstance(result, asyncio.CancelledError) for result in done)
        async with budget.reserve(None) as allowed:
            assert allowed == budget.left == total - sampled, "all that was not used was given back"

    async def in_time() -> None:
        async with asyncio.timeout(GENEROUS_S):
            await scene()

    asyncio.run(in_time())


def test_a_request_in_a_keep_pause_is_answered_after_it(chat: Any, tmp_path: Path) -> None:
    now = Fixed(value=0.0)
    config = SimulatedConfig(
        first_token_s=now, token_s=now, response_tokens=Fixed(value=4), vocab_size=100
    )
    engine = SimulatedEngine(config, PolicyVersion("l0", 0))
    save_file({"w": np.zeros(1, "<f4")}, tmp_path / "model.safetensors")

    async def scene(desk: Desk) -> None:
        await engine.start()
        await engine.pause("keep")
        asked = asyncio.create_task(desk.ask({"messages": USER}))
        await until(lambda: bool((load := engine.load()) and load.waiting + load.running))
        await engine.load_weights(tmp_path, PolicyVersion("l0", 1))
        assert not asked.done()
        await engine.resume()
        assert (await asked)[0] == 200

    made = at_desk(chat, engine, scene, max_tokens=4)
    assert [span.version for span in made.segments[0].spans] == [1]
