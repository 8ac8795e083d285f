from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import Callable
from typing import Any

import aiohttp
import numpy as np
import openai
import pytest

from buffer.wire.rollout import RolloutState, Status
from producer_workers.engines.base import GenerationError
from rolloutmq.extensions.gateway import reply as gateway_reply
from rolloutmq.extensions.gateway.agents import AgentTask
from rolloutmq.extensions.gateway.reply import Reply
from tests.extensions.gateway.test_gateway_endpoint import Desk, at_desk
from tests.producer_workers.agents import TOOL, ask
from tests.producer_workers.recorder import Recorder, loop_of, questions, run

anthropic: Any = pytest.importorskip("anthropic")

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": {"x": [1.0, "é"]}}}\n</tool_call>'
THOUGHT = "two and three"
LINES = [
    f"<think>\n{THOUGHT}\n</think>\n\nlet me see {CALL}{CALL}",
    f"<think>\nnow\n</think>\n\n{CALL}",
    "it is 5",
    "yes",
]
SCHEMA = {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "object"}}}
CLAUDE: Any = {"model": "claude", "max_tokens": 500}
TOOLS: list[Any] = [{"name": "add", "description": "adds", "input_schema": SCHEMA}]

Change = Callable[[list[Any]], list[Any]]


def conversation(
    chat: Any, agent: Any, lines: list[str] | None = None, train: str = "task"
) -> tuple[Recorder, list[RolloutState]]:
    engine = Recorder(chat, lines or LINES)
    loop = loop_of(chat, agent=agent, train=train)
    states = run(loop, engine, questions("2 + 3?", max_tokens=10_000))
    assert [(state.status, state.error) for state in states] == [(Status.COMPLETED, None)] * len(
        states
    )
    engine.check(states)
    return engine, states


def contexts(states: list[RolloutState]) -> Any:
    return states[0].extra.get("new_contexts", {})


# -- Anthropic's messages ----------------------------------------------------


def results_of(blocks: Any) -> list[Any]:
    return [
        {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "5"}]}
        for block in blocks
        if block.type == "tool_use"
    ]


def check_claude(messages: list[Any], replies: list[Any]) -> None:
    first = replies[0].content
    assert [block.type for block in first] == ["thinking", "text", "tool_use", "tool_use"]
    assert THOUGHT in first[0].thinking
    assert first[1].text == "let me see"
    assert first[2].input == {"a": 2, "b": {"x": [1.0, "é"]}}
    assert [reply.stop_reason for reply in replies] == [
        "tool_use",
        "tool_use",
        "end_turn",
        "end_turn",
    ]
    assert (
        len(
            {
                block.id
                for reply in replies[:2]
                for block in reply.content
                if block.type == "tool_use"
            }
        )
        == 3
    )


def claude(change: Change = lambda messages: messages, *, stream: bool = False) -> Any:
    async def solve(task: AgentTask) -> None:
        messages: list[Any] = list(task.messages)
        replies: list[Any] = []
        url = task.anthropic_url
        async with anthropic.AsyncAnthropic(base_url=url, api_key=task.api_key) as client:
            for _ in range(4):
                asked: Any = {
                    **CLAUDE,
                    "messages": change(messages),
                    "tools": TOOLS,
                    "system": "be brief",
                }
                counted = await client.messages.count_tokens(
                    **{key: value for key, value in asked.items() if key != "max_tokens"}
                )
                if stream:
                    async with client.messages.stream(**asked) as streamed:
                        reply: Any = await streamed.get_final_message()
                else:
                    reply = await client.messages.create(**asked)
                assert reply.usage.input_tokens == counted.input_tokens
                replies.append(reply)
                messages.append({"role": "assistant", "content": reply.content})
                results = results_of(reply.content) or [{"type": "text", "text": "sure?"}]
                messages.append({"role": "user", "content": results})
        check_claude(messages, replies)

    return solve


def as_dicts(messages: list[Any]) -> list[Any]:
    """Return copies of the messages, with blocks as plain maps."""
    made = []
    for message in messages:
        content = message["content"]
        if isinstance(content, list):
            content = [
                b if isinstance(b, dict) else b.model_dump(exclude_none=True) for b in content
            ]
        made.append({**message, "content": content})
    return list(json.loads(json.dumps(made)))


def each_block(change: Callable[[Any], Any]) -> Change:
    def changed(messages: list[Any]) -> list[Any]:
        made = as_dicts(messages)
        for message in made:
            if isinstance(message["content"], list):
                message["content"] = [b for b in map(change, message["content"]) if b]
        return made

    return changed


def written_anew(value: Any) -> Any:
    """Return a value as JavaScript's JSON would give it back, with keys in another order."""
    if isinstance(value, dict):
        return {key: written_anew(value[key]) for key in reversed(value)}
    if isinstance(value, list):
        return [written_anew(each) for each in value]
    return int(value) if isinstance(value, float) else value


def one_by_one(messages: list[Any]) -> list[Any]:
    made = []
    for message in as_dicts(messages):
        blocks = message["content"]
        split = message["role"] == "user" and isinstance(blocks, list)
        made += [{**message, "content": [b]} for b in blocks] if split else [message]
    return made


@pytest.mark.parametrize(
    "change",
    [
        lambda messages: messages,
        each_block(lambda block: block if block["type"] != "thinking" else None),
        each_block(
            lambda block: (
                {**block, "input": written_anew(block["input"])} if "input" in block else block
            )
        ),
        each_block(
            lambda block: (
                {**block, "text": block["text"].strip() + "\n"}
                if block.get("text") == "let me see"
                else block
            )
        ),
        each_block(lambda block: {**block, "cache_control": {"type": "ephemeral"}}),
        each_block(
            lambda block: {
                **block,
                **{key: "toolu_" + block[key] for key in ("id", "tool_use_id") if key in block},
            }
        ),
        one_by_one,
    ],
    ids=[
        "as it was", "without thoughts", "arguments anew", "trimmed", "cached", "other ids",
        "one by one",
    ],
)  # fmt: skip
def test_what_anthropics_client_sends_back_continues_the_tokens_that_were_sampled(
    chat: Any, change: Change
) -> None:
    _, states = conversation(chat, claude(change))
    assert len(states) == 1
    assert contexts(states) == {}


def test_a_conversation_that_ends_with_the_models_turn_is_counted_and_refused_if_asked(
    chat: Any,
) -> None:
    """Anthropic's clients count their history after each answer."""
    messages: Any = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y" * 90}]

    async def solve(task: AgentTask) -> None:
        url = task.anthropic_url
        async with anthropic.AsyncAnthropic(base_url=url, api_key=task.api_key) as client:
            counted = await client.messages.count_tokens(model="m", messages=messages)
            assert counted.input_tokens > 90
            with pytest.raises(anthropic.BadRequestError, match="ends with a message"):
                await client.messages.create(**CLAUDE, messages=messages)
            await client.messages.create(**CLAUDE, messages=messages[:1])

    conversation(chat, solve)


def test_anthropics_streams_say_what_its_messages_say(chat: Any) -> None:
    _, states = conversation(chat, claude(stream=True))
    assert len(states) == 1


def test_anthropics_client_that_blocks_is_served(chat: Any) -> None:
    def solve(task: AgentTask) -> None:
        messages: list[Any] = list(task.messages)
        with anthropic.Anthropic(base_url=task.anthropic_url, api_key=task.api_key) as client:
            with client.messages.stream(**CLAUDE, messages=messages) as stream:
                assert "".join(stream.text_stream) == "\ufffdone"
                first = stream.get_final_message()
            messages.append({"role": "assistant", "content": first.content})
            messages.append({"role": "user", "content": "on"})
            asked: Any = {**CLAUDE, "messages": messages, "stop_sequences": ["w"]}
            second = client.messages.create(**asked)
        assert (second.stop_reason, second.stop_sequence) == ("stop_sequence", "w")
        assert second.content[0].model_dump()["text"] == "\ufffdt"

    _, states = conversation(chat, solve, ["one", "two"])
    assert len(states) == 1


def test_each_new_context_is_counted_with_its_reason(chat: Any) -> None:
    """An edited system prompt, a compacted history, sub-agents at once, an edited answer."""

    async def solve(task: AgentTask) -> None:
        async with anthropic.AsyncAnthropic(
            base_url=task.anthropic_url, auth_token=task.api_key
        ) as client:

            async def ask(messages: list[Any], system: str = "s", **more: Any) -> list[Any]:
                asked: Any = {**CLAUDE, "messages": messages, "system": system, **more}
                reply = await client.messages.create(**asked)
                return [*messages, {"role": "assistant", "content": reply.content}]

            user: Any = {"role": "user", "content": "go on"}
            begun = [{"role": "user", "content": "a"}]
            one = await ask(begun)
            two = await ask([*one, user])
            await ask([*two, user], system="t")
            await ask([*begun, {"role": "user", "content": "a summary"}])
            await ask([*begun, {"role": "assistant", "content": "mine"}, user])
            await ask([*two, user], tools=TOOLS)
            await ask(begun)
            await ask([*one, {"role": "user", "content": "another way"}])
            await asyncio.gather(
                *(ask([{"role": "user", "content": f"part {n}"}], "sub") for n in range(2))
            )

    _, states = conversation(chat, solve, [f"line {n}" for n in range(10)], "all")
    assert contexts(states) == {
        "system": 1, "history": 1, "turn": 1, "tools": 1, "again": 1, "branch": 1,
        "conversation": 2, "other_system": 3,
    }  # fmt: skip
    assert len(states) == 1 + 8


def test_a_template_that_drops_thoughts_makes_new_contexts_that_are_counted(chat: Any) -> None:
    chat.chat_template = chat.chat_template.replace(
        "{{ m.content }}", "{{ m.content.split('</think>')[-1] if not loop.last else m.content }}"
    )

    async def solve(task: AgentTask) -> None:
        async with anthropic.AsyncAnthropic(
            base_url=task.anthropic_url, api_key=task.api_key
        ) as client:
            messages: list[Any] = list(task.messages)
            for _ in range(3):
                reply = await client.messages.create(**CLAUDE, messages=messages)
                messages += [{"role": "assistant", "content": reply.content}, *task.messages]

    engine, states = conversation(chat, solve, ["<think>\nhm\n</think>\n\nyes"] * 3)
    assert contexts(states) == {"template": 2}
    assert "hm" not in chat.decode(engine.read[-1])


def test_sub_agents_at_once_continue_their_own_conversations(chat: Any) -> None:
    async def solve(task: AgentTask) -> None:
        async with anthropic.AsyncAnthropic(
            base_url=task.anthropic_url, api_key=task.api_key
        ) as client:

            async def sub(number: int) -> None:
                messages: list[Any] = [{"role": "user", "content": f"part {number % 2}"}]
                for _ in range(3):
                    asked: Any = {**CLAUDE, "max_tokens": 20, "messages": messages}
                    reply = await client.messages.create(**asked)
                    messages.append({"role": "assistant", "content": reply.content})
                    messages.append({"role": "user", "content": "on"})

            await asyncio.gather(*map(sub, range(6)))

    _, states = conversation(chat, solve, ["the same"] * 18)
    assert len(states) == 6
    assert contexts(states) == {"conversation": 5}


@pytest.mark.parametrize(
    ("body", "error", "said"),
    [
        ({"messages": []}, "BadRequestError", "messages"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "BadRequestError",
            "only text",
        ),
        ({"tools": [{"type": "web_search_20260101", "name": "web_search"}]}, "BadRequestError", "runs at Anthropic"),
        ({"tool_choice": {"type": "tool", "name": "sub"}, "tools": TOOLS}, "BadRequestError", "not among tools"),
        ({"tool_choice": {"type": "any"}, "tools": TOOLS}, "BadRequestError", "cannot produce structured"),
        ({"extra_body": {"mcp_servers": [{}]}}, "BadRequestError", "mcp_servers"),
        ({"messages": [{"role": "user", "content": "go " * 99}]}, "BadRequestError", "prompt is too long"),
        ({"api_key": "rmq-other"}, "AuthenticationError", "belongs to no session"),
    ],
)  # fmt: skip
def test_what_anthropics_client_may_not_ask_raises_its_own_errors(
    chat: Any, body: Any, error: str, said: str
) -> None:
    engine = Recorder(chat, [])
    engine.max_model_len = 200

    async def scene(desk: Desk) -> None:
        url = desk.gateway.url.removesuffix("/v1")
        key = body.pop("api_key", desk.key)
        async with anthropic.AsyncAnthropic(base_url=url, api_key=key) as client:
            asked: Any = {**CLAUDE, "messages": [{"role": "user", "content": "x"}], **body}
            with pytest.raises(getattr(anthropic, error), match=said) as raised:
                await client.messages.create(**asked)
            assert raised.value.type in ("invalid_request_error", "authentication_error")

    assert at_desk(chat, engine, scene).segments == []


# -- OpenAI's responses ------------------------------------------------------

FUNCTIONS: list[Any] = [
    {
        "type": "function", "name": "add", "description": "adds", "parameters": SCHEMA,
        "strict": False,
    }
]  # fmt: skip


def outputs_of(items: Any) -> list[Any]:
    return [
        {"type": "function_call_output", "call_id": item.call_id, "output": "5"}
        for item in items
        if item.type == "function_call"
    ]


def check_responses(replies: list[Any]) -> None:
    first = replies[0].output
    assert [item.type for item in first] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
    ]
    assert THOUGHT in first[0].content[0].text
    assert first[1].content[0].text == "let me see"
    assert json.loads(first[2].arguments) == {"a": 2, "b": {"x": [1.0, "é"]}}
    assert [reply.status for reply in replies] == ["completed"] * 4
    assert replies[2].output_text == "\ufffdit is 5"


def codex(change: Change | None, *, stream: bool = False) -> Any:
    """Send the whole history, changed; or (None) only what is new, behind the previous response."""

    async def solve(task: AgentTask) -> None:
        items: list[Any] = [{"role": "user", "content": task.question}]
        replies: list[Any] = []
        client = openai.AsyncOpenAI(base_url=task.base_url, api_key=task.api_key)
        async with client:
            for _ in range(4):
                asked: Any = {"model": "gpt", "tools": FUNCTIONS, "instructions": "be brief"}
                asked["input"] = change(items) if change else items
                if replies and not change:
                    asked["previous_response_id"] = replies[-1].id
                if stream:
                    async with client.responses.stream(**asked) as streamed:
                        reply: Any = await streamed.get_final_response()
                else:
                    reply = await client.responses.create(**asked)
                replies.append(reply)
                new = outputs_of(reply.output) or [{"role": "user", "content": "sure?"}]
                items = [*items, *reply.output, *new] if change else new
        check_responses(replies)

    return solve


def each_item(change: Callable[[Any], Any]) -> Change:
    def changed(items: list[Any]) -> list[Any]:
        plain = [i if isinstance(i, dict) else i.model_dump(exclude_none=True) for i in items]
        return [made for made in map(change, plain) if made]

    return changed


def as_codex(item: Any) -> Any:
    """Send an item as Codex does: a thought keeps no text, arguments and ids are its own."""
    if item.get("type") == "reasoning":
        return {"type": "reasoning", "summary": [], "content": None, "encrypted_content": None}
    if item.get("type") == "function_call":
        arguments = json.dumps(written_anew(json.loads(item["arguments"])), indent=1)
        return {key: item[key] for key in ("type", "name", "call_id")} | {"arguments": arguments}
    if item.get("role") == "assistant":
        text = item["content"][0]["text"]
        return {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": text}],
        }
    return item


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "change",
    [
        lambda items: items,
        each_item(as_codex),
        each_item(lambda item: item if item.get("type") != "reasoning" else None),
        None,
    ],
    ids=["as it was", "as codex", "without thoughts", "by previous response"],
)
def test_what_the_client_of_responses_sends_back_continues_the_tokens_that_were_sampled(
    chat: Any, change: Change | None, stream: bool
) -> None:
    engine, states = conversation(chat, codex(change, stream=stream))
    assert len(states) == 1
    assert contexts(states) == {}
    assert "be brief" in chat.decode(engine.read[0])


def test_functions_of_a_namespace_are_offered_and_called_by_both_names(chat: Any) -> None:
    """As Codex offers its sub-agents and the tools of MCP servers."""
    space = {"type": "namespace", "name": "sums", "description": "", "tools": FUNCTIONS}

    async def solve(task: AgentTask) -> None:
        async with openai.AsyncOpenAI(base_url=task.base_url, api_key=task.api_key) as client:
            asked: Any = {"model": "m", "tools": [*FUNCTIONS, space], "input": [*task.messages]}
            first = await client.responses.create(**asked)
            calls = [item for item in first.output if item.type == "function_call"]
            assert [(call.namespace, call.name) for call in calls] == [
                ("sums", "add"),
                (None, "add"),
            ]
            asked["input"] += [*first.output, *outputs_of(first.output)]
            await client.responses.create(**asked)

    _, states = conversation(chat, solve, [CALL.replace('"add"', '"sums.add"') + CALL, "5"])
    assert len(states) == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("arguments", "given"),
    [('{"input": "*** Add\\n"}', "*** Add\n"), ('{"patch": "x"}', '{"patch":"x"}')],
    ids=["its form", "another form"],
)
def test_a_custom_tool_gets_what_the_model_gave_and_its_tokens_are_kept(
    chat: Any, stream: bool, arguments: str, given: str
) -> None:
    """As Codex offers apply_patch."""
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: LINE+"}
    tool: Any = {"type": "custom", "name": "patch", "description": "Edit.", "format": grammar}

    async def solve(task: AgentTask) -> None:
        async with openai.AsyncOpenAI(base_url=task.base_url, api_key=task.api_key) as client:
            asked: Any = {"model": "m", "tools": [tool], "input": [*task.messages]}
            if stream:
                async with client.responses.stream(**asked) as streamed:
                    first: Any = await streamed.get_final_response()
            else:
                first = await client.responses.create(**asked)
            call = first.output[-1]
            assert (call.type, call.name, call.input) == ("custom_tool_call", "patch", given)
            result = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "ok"}
            asked["input"] += [*first.output, result]
            await client.responses.create(**asked)

    line = f'<tool_call>\n{{"name": "patch", "arguments": {arguments}}}\n</tool_call>'
    _, states = conversation(chat, solve, [line, "done"])
    assert len(states) == 1


ODD = {"a": 2512292042121000001123, "b": {"code": "x = 1\n\ty\n"}}
"""An integer over 64 bits, and a text whose line breaks the model writes as they are."""


@pytest.mark.parametrize("dialect", ["chat", "claude", "codex"])
def test_an_agent_gets_numbers_and_texts_of_a_call_as_they_are_and_may_send_them_back(
    chat: Any, dialect: str
) -> None:
    async def of_chat(task: AgentTask) -> Any:
        messages: list[Any] = [*task.messages]
        said = (await ask(task, messages, tools=[TOOL])).message
        messages += [said, {"role": "tool", "tool_call_id": said.tool_calls[0].id, "content": "5"}]
        await ask(task, messages, tools=[TOOL])
        await ask(task, [{"role": "user", "content": "new"}, *messages[1:]], tools=[TOOL])
        return json.loads(said.tool_calls[0].function.arguments)

    async def of_claude(task: AgentTask) -> Any:
        messages: list[Any] = [*task.messages]
        url = task.anthropic_url
        async with anthropic.AsyncAnthropic(base_url=url, api_key=task.api_key) as client:
            said = await client.messages.create(**CLAUDE, tools=TOOLS, messages=messages)
            messages += [{"role": "assistant", "content": said.content}]
            messages += [{"role": "user", "content": results_of(said.content)}]
            await client.messages.create(**CLAUDE, tools=TOOLS, messages=messages)
            messages[0] = {"role": "user", "content": "new"}
            await client.messages.create(**CLAUDE, tools=TOOLS, messages=messages)
        return said.content[-1].input

    async def of_codex(task: AgentTask) -> Any:
        items: list[Any] = [*task.messages]
        async with openai.AsyncOpenAI(base_url=task.base_url, api_key=task.api_key) as client:
            asked: Any = {"model": "m", "tools": FUNCTIONS}
            said = await client.responses.create(**asked, input=items)
            items += [*said.output, *outputs_of(said.output)]
            await client.responses.create(**asked, input=items)
            new: list[Any] = [{"role": "user", "content": "new"}, *items[1:]]
            await client.responses.create(**asked, input=new)
        return json.loads(said.output[-1].arguments)

    given: list[Any] = []

    async def solve(task: AgentTask) -> None:
        given.append(await {"chat": of_chat, "claude": of_claude, "codex": of_codex}[dialect](task))

    chat.chat_template = chat.chat_template.replace(
        "{{ m.content }}",
        "{{ m.content }}{% for c in m.tool_calls %}{{ c.function.arguments | tojson }}{% endfor %}",
    )
    arguments = json.dumps(ODD).replace("\\n", "\n").replace("\\t", "\t")
    line = f'<tool_call>\n{{"name": "add", "arguments": {arguments}}}\n</tool_call>'
    engine, states = conversation(chat, solve, [line, "5", "5"])
    assert given == [ODD]
    assert contexts(states) == {"conversation": 1}, "the second request continued the first"
    assert json.dumps(ODD) in chat.decode(engine.read[2])


def test_a_client_of_responses_that_blocks_is_served_and_told_what_it_may_not_ask(
    chat: Any,
) -> None:
    def solve(task: AgentTask) -> None:
        with openai.OpenAI(base_url=task.base_url, api_key=task.api_key) as client:
            create: Any = client.responses.create
            first = create(model="m", input="one", instructions="mine")
            cut = create(model="m", input="on", previous_response_id=first.id, max_output_tokens=2)
            assert (cut.status, cut.incomplete_details.reason) == (
                "incomplete",
                "max_output_tokens",
            )
            for asked, said in {
                "previous_response_id": ("resp_of_another", "no earlier response"),
                "tools": ([{"type": "web_search"}], "web_search is not run here"),
                "background": (True, "background"),
                "input": ([{"type": "item_reference", "id": "x"}], "item_reference"),
                "text": ({"format": {"type": "json_object"}}, "cannot produce structured"),
            }.items():
                with pytest.raises(openai.BadRequestError, match=said[1]):
                    create(**{"model": "m", "input": "x", asked: said[0]})

            summary = {"type": "summary_text", "text": "so I said"}
            history = [
                {"role": "user", "content": "a"},
                {"type": "reasoning", "id": "r", "summary": [summary]},
                {"role": "assistant", "content": "b"},
                {"role": "developer", "content": "c"},
            ]
            create(model="m", input=history)

    engine, states = conversation(chat, solve, ["one", "two", "three"])
    assert len(states) == 3
    assert contexts(states) == {"system": 1, "conversation": 1}, "instructions are not kept"
    assert "mine" not in chat.decode(engine.read[1])
    read = chat.decode(engine.read[2])
    assert "assistant\n<think>\nso I said\n</think>\n\nb<|im_end|>" in read
    assert "system\nc<|im_end|>" in read


# -- vLLM's tokens in and out ------------------------------------------------


@pytest.mark.vllm
@pytest.mark.parametrize("stream", [False, True])
def test_tokens_in_and_out_are_answered_in_vllms_own_types(chat: Any, stream: bool) -> None:
    protocol = pytest.importorskip("vllm.entrypoints.scale_out.token_in_token_out.protocol")
    kind = protocol.GenerateTokensStreamResponse if stream else protocol.GenerateTokensResponse

    async def solve(task: AgentTask) -> None:
        url = task.anthropic_url + "/inference/v1/generate"
        headers = {"Authorization": f"Bearer {task.api_key}"}
        prompt = chat.encode("2 + 3 = ")
        async with aiohttp.ClientSession(headers=headers) as http:
            for _ in range(3):
                sampling = {
                    "max_tokens": 40,
                    "logprobs": 1,
                    "temperature": 0.5,
                    "stop_token_ids": [2],
                }
                body = {"token_ids": prompt, "sampling_params": sampling, "stream": stream}
                async with http.post(url, json=body) as reply:
                    lines = (await reply.text()).split("\n")
                assert reply.status == 200
                said = kind.model_validate_json(lines[0].removeprefix("data: "))
                (choice,) = said.choices
                assert choice.token_ids == engine.said[-1].token_ids.tolist()
                logprobs = [each.logprob for each in choice.logprobs.content]
                assert np.array_equal(np.array(logprobs, "<f4"), engine.said[-1].logprobs)
                (span,) = choice.weight_versions
                assert (span.start, span.end) == (0, len(choice.token_ids))
                prompt = [*prompt, *choice.token_ids, *chat.encode(" so ")]

    engine = Recorder(chat)
    states = run(loop_of(chat, agent=solve), engine, questions("x", max_tokens=1000))
    engine.check(states)
    assert len(states) == 1


# -- hostile and unlucky clients ---------------------------------------------

DEEP: Any = json.loads('{"a":' * 60 + "1" + "}" * 60)
PATHS = {
    "/v1/messages": {**CLAUDE, "messages": [{"role": "user", "content": "x"}]},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "x"}]},
    "/v1/responses": {"model": "m", "input": "x"},
    "/v1/chat/completions": {"model": "m", "messages": [{"role": "user", "content": "x"}]},
    "/inference/v1/generate": {"token_ids": [5], "sampling_params": {}},
}


def test_whatever_types_a_client_sends_it_is_answered_or_refused(chat: Any) -> None:
    """What other searches found; test_hostile_values.py goes on searching."""
    engine = Recorder(chat)
    odd = [
        ("/v1/messages", "tools", [{"name": "f", "input_schema": DEEP}]),
        ("/v1/responses", "tools", [{"type": "function", "name": "f", "parameters": DEEP}]),
        (
            "/v1/chat/completions",
            "messages",
            [
                {
                    "role": "assistant",
                    "tool_calls": [{"id": {}, "function": {"name": "f", "arguments": DEEP}}],
                }
            ],
        ),
        ("/v1/responses", "tools", [{"type": "custom", "name": 5, "format": 3}, 5]),
        ("/v1/chat/completions", "tools", [{"type": "function", "function": 5}]),
        ("/v1/messages", "tools", [{"name": "f", "input_schema": {"maximum": 2**70}}]),
        ("/inference/v1/generate", "token_ids", [2**31 - 1]),
        (
            "/v1/messages",
            "messages",
            [
                {
                    "role": "assistant",
                    "content": [
                        {"type": "tool_use", "id": "a", "name": "f", "input": {"a": 2**70}}
                    ],
                }
            ],
        ),
        (
            "/v1/chat/completions",
            "messages",
            [
                {
                    "role": "assistant",
                    "tool_calls": [
                        {"id": "a", "function": {"name": "f", "arguments": {"a": 2**70}}}
                    ],
                }
            ],
        ),
    ]

    async def scene(desk: Desk) -> None:
        root = desk.gateway.url.removesuffix("/v1")
        for path, field, value in odd:
            body = json.dumps({**PATHS[path], field: value}).encode()
            headers = {"x-api-key": desk.key}
            async with desk.http.post(root + path, data=body, headers=headers) as reply:
                said = await reply.read()
            assert reply.status in (200, 400), said
            assert reply.status == 400 or path == "/v1/chat/completions"

    at_desk(chat, engine, scene, max_tokens=100_000)


class Cutter:
    """A proxy that cuts the first `cuts` answers off in the middle."""

    def __init__(self, url: str, cuts: int) -> None:
        self.host, _, self.port = url.removeprefix("http://").removesuffix("/v1").partition(":")
        self.cuts = cuts

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, send = await asyncio.open_connection(self.host, int(self.port))
        pumping = asyncio.create_task(self.pump(reader, send))
        while data := await there.read(1 << 16):
            self.cuts -= 1
            writer.write(data[: len(data) // 2] if self.cuts >= 0 else data)
            await writer.drain()
            if self.cuts >= 0:
                break
        writer.close()
        send.close()
        await pumping

    async def pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)


@pytest.mark.parametrize("vendor", ["openai", "anthropic"])
def test_an_agent_whose_connection_breaks_gets_the_recorded_answer_and_no_second_sample(
    chat: Any, vendor: str
) -> None:
    async def solve(task: AgentTask) -> None:
        cutter = Cutter(task.base_url, 2)
        async with await asyncio.start_server(cutter.serve, "127.0.0.1", 0) as proxy:
            url = f"http://127.0.0.1:{proxy.sockets[0].getsockname()[1]}"
            asked: Any = {**CLAUDE, "messages": task.messages}
            if vendor == "openai":
                async with openai.AsyncOpenAI(base_url=url + "/v1", api_key=task.api_key) as client:
                    said = [
                        (await client.chat.completions.create(**asked)).choices[0].message.content
                        for _ in range(2)
                    ]
            else:
                async with anthropic.AsyncAnthropic(base_url=url, api_key=task.api_key) as client:
                    said = [
                        (await client.messages.create(**asked)).content[0].text for _ in range(2)
                    ]
        assert said == ["\ufffdone", "\ufffdtwo"], "asked again on purpose, it samples again"

    engine, states = conversation(chat, solve, ["one", "two"])
    assert len(engine.said) == len(states) == 2


def test_an_agent_whose_stream_breaks_may_ask_again_without_saying_so(
    chat: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Recorder(chat, ["one", "two"])
    whole = Reply._write
    body = {"messages": [{"role": "user", "content": "x"}], "stream": True}

    async def breaks(stream: Reply, events: Any) -> Any:
        monkeypatch.setattr(Reply, "_write", whole)
        await whole(stream, itertools.islice(events, 1))
        raise ConnectionResetError

    async def scene(desk: Desk) -> None:
        headers = {"Authorization": f"Bearer {desk.key}"}
        texts = []
        for _ in range(3):
            url = f"{desk.gateway.url}/chat/completions"
            with contextlib.suppress(aiohttp.ClientError):
                async with desk.http.post(url, json=body, headers=headers) as reply:
                    texts.append(await reply.text())
        assert ["one" in text for text in texts[-2:]] == [True, False]

    monkeypatch.setattr(Reply, "_write", breaks)
    at_desk(chat, engine, scene)
    assert len(engine.said) == 2


class SlowRecorder(Recorder):
    """Takes three pulses of a stream for each turn, and raises `refused`."""

    refused = ""
    pulses = 0

    async def generate(self, *request: Any) -> Any:
        self.pulses = 0
        while self.pulses < 3:
            await asyncio.sleep(0.01)
        if self.refused:
            raise GenerationError(self.refused)
        return await super().generate(*request)


async def stream_of(vendor: str, task: AgentTask) -> str:
    if vendor == "anthropic":
        asked: Any = {**CLAUDE, "messages": task.messages}
        async with (
            anthropic.AsyncAnthropic(base_url=task.anthropic_url, api_key=task.api_key) as client,
            client.messages.stream(**asked) as messages,
        ):
            return str(await messages.get_final_text())
    async with openai.AsyncOpenAI(base_url=task.base_url, api_key=task.api_key) as client:
        if vendor == "chat":
            create: Any = client.chat.completions.create
            chunks = await create(model="m", messages=task.messages, stream=True)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])
        given: Any = {"model": "m", "input": task.messages}
        async with client.responses.stream(**given) as events:
            seen = [event async for event in events]
            assert [event.sequence_number for event in seen] == [*range(len(seen))]
            assert [event.type for event in seen].count("response.in_progress") > 1
        reply: Any = seen[-1]
        reply = reply.response
        assert reply.error is None, reply.error
        return str(reply.output_text)


@pytest.mark.parametrize("vendor", ["chat", "responses", "anthropic"])
def test_a_stream_says_that_a_turn_is_still_sampled_and_then_why_it_failed(
    chat: Any, vendor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway_reply, "PULSE_S", 0.01)
    engine = SlowRecorder(chat, ["one"])
    write = Reply._write

    async def counted(stream: Reply, events: Any) -> Any:
        engine.pulses += 1
        return await write(stream, events)

    monkeypatch.setattr(Reply, "_write", counted)

    async def solve(task: AgentTask) -> None:
        assert await stream_of(vendor, task) == "\ufffdone"
        engine.refused = "too hot"
        with pytest.raises((openai.APIError, anthropic.APIError, AssertionError), match="too hot"):
            await stream_of(vendor, task)

    states = run(loop_of(chat, agent=solve), engine, questions("x", max_tokens=1000))
    engine.check(states)
    assert [state.error for state in states] == [None]
