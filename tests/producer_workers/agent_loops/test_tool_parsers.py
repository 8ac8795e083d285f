"""Calls as models write them; what cannot be read is a call without arguments, never an exception."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from producer_workers.agent_loops.tool_parsers import (
    PARSERS,
    before_calls,
    calls_in,
)

ADD: dict[str, Any] = {"a": 1, "b": {"c": ["}", '"']}}


def found(text: str, parser: str) -> list[tuple[str, Any]]:
    return [(call.name, call.arguments) for call in calls_in(text, parser)]


JSON_ADD = '{"a": 1, "b": {"c": ["}", "\\""]}}'
LLAMA = f'<|python_tag|>{{"name": "add", "parameters": {JSON_ADD}}}'
V3 = '[TOOL_CALLS] [{"name": "add", "arguments": %s}, {"name": "now", "arguments": "{}"}]'


@pytest.mark.parametrize(
    ("parser", "text", "calls"),
    [
        (
            "hermes",
            f'Let me see.\n<tool_call>\n{{"name": "add", "arguments": {JSON_ADD}}}\n</tool_call>\n'
            '<tool_call>{"name": "now", "arguments": {}}</tool_call>',
            [("add", ADD), ("now", {})],
        ),
        ("llama", LLAMA, [("add", ADD)]),
        ("llama", LLAMA + '; {"name": "now", "parameters": {}}', [("add", ADD), ("now", {})]),
        ("llama", 'The answer is {"a": 1}', []),
        ("mistral", V3 % JSON_ADD, [("add", ADD), ("now", {})]),
        ("mistral", f"[TOOL_CALLS]add{JSON_ADD}[TOOL_CALLS]now{{}}", [("add", ADD), ("now", {})]),
        ("mistral", "no call", []),
    ],
)
def test_calls_are_read_in_each_form(parser: str, text: str, calls: list[Any]) -> None:
    assert found(text, parser) == calls
    assert [c.id for c in calls_in(text, parser)] == [f"call_{n}" for n in range(len(calls))]


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1</tool_call>'),
        ("hermes", "<tool_call>add(1)"),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
        ("llama", '{"name": "add", "parameters": {"a": '),
        ("mistral", "[TOOL_CALLS] add(1)"),
        ("mistral", "[TOOL_CALLS] [1]"),
    ],
)
def test_a_call_that_cannot_be_read_has_no_arguments_and_keeps_its_text(
    parser: str, text: str
) -> None:
    (call,) = calls_in(text, parser)
    assert call.arguments is None
    assert call.raw_arguments


@pytest.mark.parametrize(
    ("parser", "call"),
    [
        ("hermes", '<tool_call>{"name": "rm", "arguments": {}}</tool_call>'),
        ("llama", '{"name": "rm", "parameters": {}}'),
        ("mistral", "[TOOL_CALLS]rm{}"),
    ],
)
def test_what_is_only_thought_of_is_not_called(parser: str, call: str) -> None:
    assert calls_in(f"<think>\n{call} would be bad\n</think>\n\nI will not.", parser) == []
    assert found(f"<think>\n{call}?\n</think>\n\n{call}", parser) == [("rm", {})]


@pytest.mark.parametrize(
    ("parser", "call"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": %s}</tool_call>'),
        ("llama", '{"name": "f", "parameters": %s}'),
        ("mistral", "[TOOL_CALLS]f%s"),
    ],
)
def test_a_call_that_no_group_could_hold_cannot_be_read(parser: str, call: str) -> None:
    """Models that fell into a loop write such; it would fail the whole group when it is handed in."""
    for deep in (40, 500, 100_000):
        (read,) = calls_in(call % ('{"a":' * deep + "1" + "}" * deep), parser)
        assert read.arguments is None


MARKS = [
    "</think>",
    "[/THINK]",
    "<tool_call>",
    "</tool_call>",
    "[TOOL_CALLS]",
    "<|python_tag|>",
    *'{}"\\;',
]
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

TEMPLATES = {
    "hermes": "{{ m.content }}{% for c in m.tool_calls %}\n<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}',
    "llama": "<|python_tag|>{% for c in m.tool_calls %}"
    '{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}'
    "{% if not loop.last %}; {% endif %}{% endfor %}",
    "mistral": "{{ m.content }}{% for c in m.tool_calls %}[TOOL_CALLS]"
    "{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}{% endfor %}",
    "mistral v3": "{{ m.content }}[TOOL_CALLS] [{% for c in m.tool_calls %}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "{% if not loop.last %}, {% endif %}{% endfor %}]",
}


def written(tokenizer: Any, family: str, calls: list[tuple[str, Any]], content: str = "") -> str:
    """Return a turn as a chat template of that family writes it."""
    asked = [
        {"type": "function", "function": {"name": name, "arguments": arguments}}
        for name, arguments in calls
    ]
    turn = {"role": "assistant", "content": content, "tool_calls": asked}
    template = "{% for m in messages %}" + TEMPLATES[family] + "{% endfor %}"
    return str(tokenizer.apply_chat_template([turn], chat_template=template, tokenize=False))


@pytest.mark.parametrize("family", TEMPLATES)
@settings(max_examples=40)
@given(calls=CALLS, thoughts=CALLS, prose=PROSE, thinks=st.sampled_from(["", "<think>", "open"]))
def test_what_a_template_writes_is_read_whatever_its_texts_say(
    tokenizer: Any, family: str, calls: Any, thoughts: Any, prose: str, thinks: str
) -> None:
    """`thinks`: not at all, or calls are thought of; "open" where the prompt has begun the thought."""
    parser = family.split()[0]
    thought = ""
    if thinks:
        begin = "" if thinks == "open" else "<think>\n"
        thought = f"{begin}{prose}{written(tokenizer, family, thoughts)} would be bad\n</think>\n\n"
    said = written(tokenizer, family, calls, prose)
    assert found(thought + said, parser) == calls
    if parser != "llama":  # which says nothing before a call
        assert before_calls(thought + said, parser).strip() == (thought + prose).strip()


@given(st.text(alphabet='<tool_call>{}[]"\\;:,TOLCAS name/arguments|1', max_size=200))
def test_parsers_never_raise(text: str) -> None:
    for parser in PARSERS:
        calls_in(text, parser)
