from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from buffer.wire.group import RolloutGroup
from buffer.wire.group_bytes import encode
from buffer.wire.rollout import RolloutState
from producer_workers.agent_loops.tool_parsers import HermesParser
from rolloutmq.extensions.gateway.turn import as_openai
from tests.thoroughness import examples

PARSER = HermesParser()
CALL = '<tool_call>{"name": "rm", "arguments": {}}</tool_call>'


def found(text: str) -> list[tuple[str, Any]]:
    return [(call.name, call.arguments) for call in PARSER.parse(text).calls]


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "add", "arguments": {"a": 1</tool_call>',
        "<tool_call>add(1)",
        '<tool_call>{"arguments": {}}</tool_call>',
        # models that fell into a loop write such; it would fail the whole group at its submit
        *(CALL.replace("{}", '{"a":' * n + "1" + "}" * n) for n in (40, 500, 100_000)),
    ],
    ids=range(6),
)
def test_a_call_that_cannot_be_read_has_no_arguments_and_keeps_its_text(text: str) -> None:
    (call,) = PARSER.parse(text).calls
    assert call.arguments is None
    assert call.raw_arguments


NUMBER = 2512292042121000001123

VALUES = st.recursive(
    st.none()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(st.dictionaries(st.text(max_size=3), VALUES, max_size=3), st.booleans())
@example({"a": [NUMBER]}, False)
@example({"code": "a = 1\n\tb\r\n"}, True)
def test_an_agent_gets_the_values_that_the_model_wrote(value: dict[str, Any], raw: bool) -> None:
    """`raw`: the model writes line breaks and tabs in a text as they are."""
    arguments = json.dumps(value)
    if raw:
        for escape, sign in {"\\n": "\n", "\\t": "\t", "\\r": "\r"}.items():
            arguments = re.sub(
                rf"(?<!\\)((?:\\\\)*){re.escape(escape)}", rf"\g<1>{sign}", arguments
            )
    (call,) = PARSER.parse(
        f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
    ).calls
    told = as_openai(call)["function"]
    assert told["name"] == "f"
    assert json.loads(told["arguments"]) == value, "an agent's parser is strict"
    encode(RolloutGroup("g-1", "g", [RolloutState(tool_calls=[call])]))


@pytest.mark.parametrize(
    "arguments", ['{"a": 1e400}', '{"a": NaN}', '{"a": "\\ud800"}', '{"a": 1,}']
)
def test_arguments_that_no_parser_reads_alike_are_no_call(arguments: str) -> None:
    text = f'{{"name": "f", "arguments": {arguments}}}'
    (call,) = PARSER.parse(f"<tool_call>{text}</tool_call>").calls
    assert (call.arguments, call.raw_arguments) == (None, text)


def test_of_a_key_that_is_written_twice_the_last_value_counts() -> None:
    """As in the JSON parsers of Python, JavaScript, Go and Rust, so agent and tool get the same."""
    assert found('<tool_call>{"name": "f", "arguments": {"a": 1, "a": 2}}</tool_call>') == [
        ("f", {"a": 2})
    ]


def test_what_is_only_thought_of_is_not_called() -> None:
    assert found(f"<think>\n{CALL} would be bad\n</think>\n\nI will not.") == []
    assert found(f"<think>\n{CALL}?\n</think>\n\n{CALL}") == [("rm", {})]


MARKS = [
    "</think>", "[/THINK]", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>",
    *'{}"\\;',
]  # fmt: skip
TEXTS = st.lists(st.sampled_from(MARKS) | st.text(max_size=4), max_size=6).map("".join)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)
CALLS = st.lists(
    st.tuples(
        st.from_regex(r"[A-Za-z_][\w-]{0,9}", fullmatch=True),
        st.dictionaries(TEXTS, JSON, max_size=3),
    ),
    min_size=1,
    max_size=3,
)
PROSE = st.text(alphabet="abc .,?\n", max_size=20)

TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls %}\n<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}{% endfor %}"
)


def written(tokenizer: Any, calls: list[tuple[str, Any]], content: str = "") -> str:
    """Return a turn as a chat template writes it."""
    asked = [
        {"type": "function", "function": {"name": name, "arguments": arguments}}
        for name, arguments in calls
    ]
    turn = {"role": "assistant", "content": content, "tool_calls": asked}
    return str(tokenizer.apply_chat_template([turn], chat_template=TEMPLATE, tokenize=False))


@settings(max_examples=examples(100))
@given(calls=CALLS, thoughts=CALLS, prose=PROSE, thinks=st.sampled_from(["", "<think>", "open"]))
def test_what_a_template_writes_is_read_whatever_its_texts_say(
    tokenizer: Any, calls: Any, thoughts: Any, prose: str, thinks: str
) -> None:
    """`thinks`: not at all, or calls are thought of; "open" where the prompt has begun the thought."""
    thought = ""
    if thinks:
        begin = "" if thinks == "open" else "<think>\n"
        thought = f"{begin}{prose}{written(tokenizer, thoughts)} would be bad\n</think>\n\n"
    turn = PARSER.parse(thought + written(tokenizer, calls, prose))
    assert [(call.name, call.arguments) for call in turn.calls] == calls
    assert [call.id for call in turn.calls] == [f"call_{n}" for n in range(len(calls))]
    assert turn.content.strip() == (thought + prose).strip()


@given(st.text(alphabet='<tool_call>{}[]"\\;:,TOLCAS name/arguments|1', max_size=200))
def test_a_parser_never_raises(text: str) -> None:
    PARSER.parse(text)
