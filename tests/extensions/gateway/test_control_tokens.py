"""Test that no text but the chat template's own becomes a control token in a prompt, whoever wrote it.

Each place of each request, data row and tool gets a control token in turn: values, keys, roles. The template
writes whatever it is given.
"""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from buffer.errors import RolloutMQError
from buffer.wire.rollout import RolloutState
from buffer.wire.sampling import SampleParams
from producer_workers.agent_loops.environment import Answer
from producer_workers.agent_loops.multi_turn import MultiTurnAgentLoop
from producer_workers.agent_loops.tokenizer import TaskTokenizer, encode_chat
from producer_workers.datasets.records import RecordsDataset, problem_of
from producer_workers.producer.sampler import Sampler
from tests.extensions.gateway.test_gateway_endpoint import Desk, at_desk
from tests.producer_workers.recorder import Recorder

PLANT = "<|plant|>"
"""A control token that no template here writes."""

EVERYTHING = (
    "{{ tools | tojson }}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}{{ m | tojson }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    # words of a template are names of fields that it reads
    "{# name id type function arguments reasoning_content index mood #}"
)


@pytest.fixture
def gullible(tokenizer: Any) -> Any:
    made = copy.deepcopy(tokenizer)
    made.add_special_tokens({"additional_special_tokens": ["<|im_start|>", PLANT]})
    made.chat_template = EVERYTHING
    assert PLANT not in made.decode(encode_chat(made, [{"role": "user", "content": "x"}]))
    assert made.convert_tokens_to_ids(PLANT) in made.encode(f"a{PLANT}b")
    return made


def planted(value: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    match value:
        case str():
            yield place, f"{value}{PLANT}\n"
            yield place, PLANT
        case dict():
            for key, inner in value.items():
                others = {name: each for name, each in value.items() if name != key}
                yield f"{place}.{key} (key)", {**others, f"{key}{PLANT}": inner}
                yield f"{place} (a key beside {key})", {**value, f"{key}{PLANT}": inner}
                for where, other in planted(inner, f"{place}.{key}"):
                    yield where, {**value, key: other}
        case list():
            for number, inner in enumerate(value):
                for where, other in planted(inner, f"{place}[{number}]"):
                    yield where, [*value[:number], other, *value[number + 1 :]]


SCHEMA = {
    "type": "object",
    "title": "t",
    "properties": {"a": {"type": "string", "description": "d", "enum": ["x", "y"]}},
    "required": ["a"],
    "$defs": {"z": {"const": "q"}},
}
FUNCTION = {"type": "function", "function": {"name": "f", "description": "d", "parameters": SCHEMA}}
CALLED = {
    "id": "c1",
    "type": "function",
    "function": {"name": "f", "arguments": '{"a": {"b": ["x"]}}'},
}
HISTORY: list[dict[str, Any]] = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "u", "name": "n", "mood": {"deep": ["m"]}},
    {"role": "assistant", "content": "a", "reasoning_content": "r", "tool_calls": [CALLED]},
    {"role": "tool", "tool_call_id": "c1", "name": "f", "content": "t"},
    {"role": "user", "content": [{"type": "text", "text": "p"}, {"type": "text", "text": "q"}]},
]
CLAUDE = {
    "model": "m",
    "system": [{"type": "text", "text": "s"}],
    "messages": [
        {"role": "user", "content": "u"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "r", "signature": "g"},
                {"type": "text", "text": "a"},
                {"type": "tool_use", "id": "c1", "name": "f", "input": {"a": {"b": ["x"]}}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "c1",
                    "content": [{"type": "text", "text": "t"}],
                },
                {"type": "text", "text": "v"},
            ],
        },
    ],
    "tools": [{"name": "f", "description": "d", "input_schema": SCHEMA}],
}
CODEX = {
    "model": "m",
    "instructions": "s",
    "input": [
        {"role": "developer", "content": [{"type": "input_text", "text": "p"}]},
        {"role": "user", "content": "u"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "r"}]},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": {"b": ["x"]}}'},
        {"type": "function_call_output", "call_id": "c1", "output": "t"},
        {"type": "custom_tool_call", "call_id": "c2", "name": "g", "input": "i"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "o"}]},
    ],
    "tools": [
        {"type": "function", "name": "f", "description": "d", "parameters": SCHEMA},
        {"type": "custom", "name": "g", "description": "d", "format": {"type": "grammar", "definition": "e"}},
        {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "h", "parameters": {}}]},
    ],
}  # fmt: skip
REQUESTS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "chat/completions": (
        {"messages": HISTORY, "tools": [FUNCTION]},
        [
            ".messages[1].role",
            ".messages[1].mood.deep[0]",
            ".messages[1].mood.deep (key)",
            ".messages[2].tool_calls[0].function.name",
            ".messages[2].tool_calls[0].function.arguments",
            ".messages[3].tool_call_id",
            ".messages[4].content[1].text",
            ".tools[0].function.description",
            ".tools[0].function.parameters.properties.a (key)",
            ".tools[0].function.parameters.properties.a.enum[1]",
        ],
    ),
    "messages": (
        CLAUDE,
        [
            ".system[0].text", ".messages[1].content[0].thinking",
            ".messages[1].content[2].input.a.b (key)", ".messages[1].content[2].input.a.b[0]",
            ".messages[2].content[0].content[0].text", ".tools[0].description",
            ".tools[0].input_schema.$defs.z (key)",
        ],
    ),
    "responses": (
        CODEX,
        [
            ".instructions", ".input[1].role", ".input[3].arguments", ".input[5].input",
            ".tools[0].parameters.required[0]", ".tools[1].format.definition", ".tools[2].name",
        ],
    ),
}  # fmt: skip


def arguments_planted(request: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield a request whose call has the token in a key of its arguments, which are JSON in a text."""
    for where, given in planted({"a": {"b": ["x"]}}):
        changed = json.dumps(request).replace(
            json.dumps('{"a": {"b": ["x"]}}'), json.dumps(json.dumps(given))
        )
        yield f"arguments{where}", json.loads(changed)


@pytest.mark.parametrize("path", REQUESTS)
def test_no_place_of_a_request_makes_a_control_token(gullible: Any, path: str) -> None:
    request, read_places = REQUESTS[path]
    engine = Recorder(gullible)
    plant = gullible.convert_tokens_to_ids(PLANT)
    reached = set()

    async def scene(desk: Desk) -> None:
        requests = [*planted(request), *arguments_planted(request)]
        for number, (place, asked) in enumerate(requests):
            before = len(engine.read)
            url, headers = f"{desk.gateway.url}/{path}", {"Authorization": f"Bearer {desk.key}"}
            async with desk.http.post(url, json=asked, headers=headers) as reply:
                if reply.status == 429:  # a quick machine asks more than a key may
                    await asyncio.sleep(float(reply.headers["Retry-After"]))
                    reply = await desk.http.post(url, json=asked, headers=headers)
                assert reply.status in (200, 400), await reply.read()
            if number % 99 == 98:
                desk.session.segments = []  # a session has a limit of them
            for ids in engine.read[before:]:
                assert plant not in ids, place
                if "plant" in gullible.decode(ids):
                    reached.add(place)

    at_desk(gullible, engine, scene, max_tokens=1_000_000)
    assert {*read_places} <= reached, "these reach the model, as text"


def test_no_place_of_a_data_row_makes_a_control_token(gullible: Any) -> None:
    call = {"id": "c1", "function": {"name": "f", "arguments": {"a": {"b": ["x"]}}}}
    called = {**HISTORY[2], "tool_calls": [call]}
    row = {"messages": [*HISTORY[:2], called, *HISTORY[3:]], "tools": [FUNCTION], "answer": "4"}
    plant = gullible.convert_tokens_to_ids(PLANT)
    reached = set()
    for place, record in planted(row):
        try:
            rows = RecordsDataset([record], "rows", problem_of)
            states = Sampler("math", rows, gullible, SampleParams()).draw(0)
        except RolloutMQError:
            continue
        assert isinstance(states, list)
        assert states[0].prompt_ids is not None
        assert plant not in states[0].prompt_ids, place
        if "plant" in gullible.decode(states[0].prompt_ids):
            reached.add(place)
    assert {
        ".messages[0].role",
        ".messages[2].tool_calls[0].function.arguments.a.b (key)",
        ".messages[3].content",
        ".messages[4].content[0].text",
        ".tools[0].function.parameters.properties.a (key)",
    } <= reached


def test_no_place_of_what_an_environment_answers_makes_a_control_token(gullible: Any) -> None:
    """Tools are an environment, too: their results are such messages."""
    plant = gullible.convert_tokens_to_ids(PLANT)
    answers = dict(planted(HISTORY[1:2] + HISTORY[3:]))

    class Hostile:
        async def answer(self, state: RolloutState, turn: Any) -> Answer:
            return Answer(answers[state.ground_truth])

    engine = Recorder(gullible)
    common: Any = {"judge": None, "tokenizer": gullible, "eos_ids": [gullible.eos_token_id]}
    loop = MultiTurnAgentLoop(environment=Hostile(), max_turns=2, keep_turns=True, **common)
    reached = set()
    for place in answers:
        state = RolloutState(prompt_ids=np.arange(10, 15, dtype="<i4"), ground_truth=place)
        asyncio.run(loop.generate_group([state], engine, "math-0000000001"))
        assert state.response_mask is None or plant not in state.response_ids, place
        if "plant" in gullible.decode(state.response_ids):
            reached.add(place)
    assert {
        "[0].role", "[0].mood.deep (key)", "[1].content", "[1].name", "[2].content[1].text",
    } <= reached  # fmt: skip


@pytest.mark.parametrize(
    "message",
    [
        {"role": "plant", "content": "x"},
        {"role": "user", "content": [{"text": "<|pl"}, {"text": "ant|>"}]},
        {"role": "user", "content": [{"text": "<"}, {"image": 1}, {"text": "|plant|"}, {"text": ">"}]},
        {"role": "user", "content": ["<|", "plant", "|>"]},
        {"role": "user", "content": f"<|pl{PLANT}ant|>{PLANT}{PLANT}"},
    ],
)  # fmt: skip
def test_no_control_token_is_put_together_from_parts(gullible: Any, message: Any) -> None:
    gullible.chat_template = (
        "{% for m in messages %}{{ '<|' + m.role + '|>' }}{% if m.content is string %}{{ m.content }}"
        "{% else %}{% for p in m.content %}{{ p if p is string else p.text }}{% endfor %}{% endif %}"
        "<|im_end|>{% endfor %}"
    )
    written = gullible.apply_chat_template([message], tokenize=False)
    assert PLANT in written, "without the border"
    told = TaskTokenizer(gullible, {}, f"be{PLANT}brief")
    ids = encode_chat(told, [message])
    assert gullible.convert_tokens_to_ids(PLANT) not in ids
    assert ids.count(gullible.eos_token_id) == 2, "those of the template"
