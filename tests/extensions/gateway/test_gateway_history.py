from __future__ import annotations

import asyncio
import copy
import json
import os
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from buffer.errors import ConfigError
from rolloutmq.extensions.gateway.agents import AgentError, AgentTask, ProgramAgent
from rolloutmq.extensions.gateway.dialects.openai_chat import ChatRequest
from tests.extensions.gateway.test_gateway_endpoint import USER, Desk, at_desk
from tests.producer_workers.agents import PROGRAM, ask
from tests.producer_workers.recorder import Recorder, loop_of, questions
from tests.thoroughness import examples

HALVES = st.characters(categories=["Cs"])
CUT = st.text(st.one_of(st.sampled_from('a"\\/🙂'), HALVES), max_size=8)


def read_by(engine: Recorder, chat: Any) -> str:
    return str(chat.decode(engine.read[-1], skip_special_tokens=True))


def thinker(chat: Any) -> Any:
    """Return the tokenizer with a template that reads a field of its own."""
    made = copy.deepcopy(chat)
    made.chat_template = chat.chat_template.replace(
        "{{ m.content }}", "{{ m.reasoning_content }}{{ m.mood }}{{ m.content }}"
    )
    assert "mood" in made.chat_template
    return made


@settings(max_examples=examples(25), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(CUT)
def test_half_a_character_is_replaced_and_the_rest_is_read(chat: Any, text: str) -> None:
    whole = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    engine = Recorder(chat)

    async def scene(desk: Desk) -> None:
        body = {"messages": [{"role": "user", "content": f"<{text}>"}]}
        assert (await desk.ask(json.dumps(body).encode()))[0] == 200
        assert f"<{whole}>" in read_by(engine, chat)
        body_as_bytes = json.dumps(body, ensure_ascii=False).encode("utf-8", "surrogatepass")
        assert (await desk.ask(body_as_bytes))[0] == 200

    at_desk(chat, engine, scene, max_tokens=10_000)


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text("ab", max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text("ab"), inner, max_size=2),
    max_leaves=4,
)


@given(ANYTHING)
def test_content_is_text_that_is_kept_or_it_is_refused(content: Any) -> None:
    try:
        asked = ChatRequest.model_validate({"messages": [{"role": "user", "content": content}]})
    except ValueError:
        assert not isinstance(content, str)
    else:
        assert asked.messages[0]["content"] == (content or "")
        assert content is None or isinstance(content, str) or content == []


@pytest.mark.parametrize(
    "field",
    [
        {"function_call": {"name": "f", "arguments": "{}"}},
        {"audio": {"id": "x"}},
        {"refusal": "I will not"},
        {"reasoning_content": 5},
        {"tool_calls": [{"id": "1", "type": "custom", "custom": {"name": "f", "input": "x"}}]},
        {"tool_calls": [{"id": "1", "function": {"name": 5, "arguments": "{}"}}]},
    ],
)
def test_a_part_of_the_history_that_cannot_be_read_is_refused_by_name(
    field: dict[str, Any],
) -> None:
    message = {"role": "assistant", "content": "x", **field}
    with pytest.raises(ValueError, match=next(iter(field))):
        ChatRequest.model_validate({"messages": [*USER, message, *USER]})


def test_a_field_that_the_template_reads_reaches_the_model_and_no_other_ends_a_segment(
    chat: Any,
) -> None:
    tokenizer = thinker(chat)
    engine = Recorder(tokenizer)

    async def scene(desk: Desk) -> None:
        thought = {
            "role": "assistant",
            "content": "4",
            "reasoning_content": "2+2 ",
            "mood": "calm ",
        }
        status, said = await desk.ask({"messages": [*USER, thought, *USER]})
        assert status == 200
        assert "2+2 calm 4" in read_by(engine, tokenizer)
        # clients send the model's turn back with fields of their own
        own = {**said["choices"][0]["message"], "provider_specific_fields": {"a": 1}, "audio": None}
        again = [*USER, thought, *USER, own, {"role": "user", "content": "on", "cost": 0.1}]
        assert (await desk.ask({"messages": again}))[0] == 200

    assert len(at_desk(tokenizer, engine, scene, max_tokens=10_000).segments) == 1


LATE_SYSTEM = (
    "{% if m.role == 'system' and not loop.first %}{{ raise_exception('late') }}{% endif %}"
)
DROPPED_SYSTEM = "{% if m.role == 'system' and not loop.first %}{% continue %}{% endif %}"
ALTERNATING = (
    LATE_SYSTEM
    + "{% if loop.previtem and loop.previtem.role == m.role %}{{ raise_exception('x') }}{% endif %}"
)


@pytest.mark.parametrize("rule", ["", LATE_SYSTEM, DROPPED_SYSTEM, ALTERNATING])
def test_system_messages_of_agents_are_read_where_a_template_wants_one_at_the_beginning(
    chat: Any, rule: str
) -> None:
    """Codex begins with two of a developer and two of a user; Claude Code has some in between."""
    loop = "{% for m in messages %}"
    chat.chat_template = chat.chat_template.replace(loop, loop + rule)
    engine = Recorder(chat)
    roles = ["developer", "system", "user", "user", "system"]
    begun = [{"role": role, "content": f"part {n}"} for n, role in enumerate(roles)]

    async def scene(desk: Desk) -> None:
        status, said = await desk.ask({"messages": begun})
        assert status == 200, said
        turn = said["choices"][0]["message"]
        late = [{"role": "system", "content": "part 5"}, {"role": "user", "content": "part 6"}]
        status, said = await desk.ask({"messages": [*begun, turn, *late]})
        assert status == 200, said
        parts = [read_by(engine, chat).find(f"part {n}") for n in range(7)]
        assert -1 not in parts
        assert parts == sorted(parts)

    assert len(at_desk(chat, engine, scene, max_tokens=10_000).segments) == 1


class Eavesdropper:
    """A proxy that notes what is sent to it."""

    def __init__(self) -> None:
        self.heard = b""

    async def listen(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.heard += await reader.read(2000)
        writer.close()


@pytest.mark.parametrize("no_proxy", [{}, {"no_proxy": "a.test"}, {"NO_PROXY": "b.test"}])
@pytest.mark.parametrize("kind", ["function", "program"])
def test_requests_to_the_gateway_never_reach_a_proxy(
    chat: Any, kind: str, no_proxy: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "agent.py").write_text(PROGRAM, encoding="utf-8")
    proxy = Eavesdropper()
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)

    async def solve(task: AgentTask) -> float:
        await ask(task, task.messages)
        return 1.0

    async def scene() -> None:
        async with await asyncio.start_server(proxy.listen, "127.0.0.1", 0) as listening:
            port = listening.sockets[0].getsockname()[1]
            for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY", "https_proxy"):
                monkeypatch.setenv(name, f"http://127.0.0.1:{port}")
            for name, value in no_proxy.items():
                monkeypatch.setenv(name, value)
            agent: dict[str, Any] = (
                {"agent": solve}
                if kind == "function"
                else {
                    "agent": None,
                    "command": [sys.executable, str(tmp_path / "agent.py"), "{question}"],
                }
            )
            engine = Recorder(chat)
            loop = loop_of(chat, **agent)
            (state, *_) = await loop.generate_group(questions("2+2?"), engine, "math-0000000001")
            assert state.error is None
        assert proxy.heard == b""
        assert {**no_proxy, "": "127.0.0.1"}.popitem()[1] in os.environ["no_proxy"]

    asyncio.run(scene())


def test_the_key_of_a_session_is_in_no_command_line() -> None:
    with pytest.raises(ConfigError) as refused:
        ProgramAgent(["agent", "--key={api_key}"], 1.0)
    assert "OPENAI_API_KEY" in str(refused.value.hint)


PRINTS = "import sys; [sys.stderr.write('x' * (1 << 20)) for _ in range(256)]; sys.exit('the end')"


def test_of_what_a_program_prints_the_end_is_kept() -> None:
    async def scene() -> None:
        tracemalloc.start()
        task = AgentTask(
            "http://127.0.0.1:1/v1", "key", [{"role": "user", "content": "a" * (1 << 20)}]
        )
        with pytest.raises(AgentError, match=r"exited with 1: x+the end"):
            await ProgramAgent([sys.executable, "-c", PRINTS], 400.0).run(lambda: task)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 32 << 20

    asyncio.run(scene())
