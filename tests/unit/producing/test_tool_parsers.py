"""Calls as models write them; what cannot be read is a call without arguments, never an exception."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from producer_workers.agent_loops.tool_parsers import PARSERS, parse_hermes, parse_llama, parse_mistral

ADD: dict[str, Any] = {"a": 1, "b": {"c": ["}", '"']}}


def found(calls: list[Any]) -> list[tuple[str, Any]]:
    return [(call.name, call.arguments) for call in calls]


def test_hermes_reads_every_call_of_a_turn() -> None:
    text = (
        'Let me see.\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": {"c": ["}", "\\""]}}}\n</tool_call>\n'
        '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    )
    assert found(parse_hermes(text)) == [("add", ADD), ("now", {})]
    assert [call.id for call in parse_hermes(text)] == ["call_0", "call_1"]


def test_llama_reads_one_or_several_objects_and_no_prose() -> None:
    one = '<|python_tag|>{"name": "add", "parameters": {"a": 1, "b": {"c": ["}", "\\""]}}}'
    assert found(parse_llama(one)) == [("add", ADD)]
    assert found(parse_llama(one + '; {"name": "now", "parameters": {}}')) == [("add", ADD), ("now", {})]
    assert parse_llama('The answer is {"a": 1}') == []


def test_mistral_reads_both_of_its_forms() -> None:
    v3 = '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}, {"name": "now", "arguments": "{}"}]'
    assert found(parse_mistral(v3)) == [("add", {"a": 1}), ("now", {})]
    assert found(parse_mistral('[TOOL_CALLS]add{"a": 1}[TOOL_CALLS]now{}')) == [("add", {"a": 1}), ("now", {})]
    assert parse_mistral("no call") == []


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
def test_a_call_that_cannot_be_read_has_no_arguments_and_keeps_its_text(parser: str, text: str) -> None:
    (call,) = PARSERS[parser](text)
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
    assert PARSERS[parser](f"<think>\n{call} would be bad\n</think>\n\nI will not.") == []
    assert found(PARSERS[parser](f"<think>\n{call}?\n</think>\n\n{call}")) == [("rm", {})]


@given(st.text(alphabet='<tool_call>{}[]"\\;:,TOLCAS name/arguments|1', max_size=200))
def test_parsers_never_raise(text: str) -> None:
    for parser in PARSERS.values():
        parser(text)
