"""Test that a message that a session knows is read as if it were new, and no other is taken for it."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from buffer.wire import group_bytes
from buffer.wire.group import RolloutGroup
from rolloutmq.extensions.gateway.agents import AgentTask
from rolloutmq.extensions.gateway.guests import Refusal
from rolloutmq.extensions.gateway.known_messages import Continued, Known
from rolloutmq.extensions.gateway.server import DIALECTS, _parse
from tests.extensions.gateway.test_recorded_tokens import EDITS, LINES, play
from tests.producer_workers.recorder import Recorder, loop_of, questions, run
from tests.thoroughness import examples

ANYWHERE: list[bytes] = [
    b'{"role":"user","content":"a"}',
    b'{"content":"a","role":"user"}',
    b'{ "role": "user", "content": "a" }',
    rb'{"role":"user","content":"\u0061"}',
    b'{"role":"assistant","role":"user","content":"a"}',
    b'{"role":"user","content":"a "}',
    b'{"role":"user","content":[{"type":"text","text":"a"}]}',
    b'{"role":"user","content":[{"type":"text","text":"a","cache_control":{"type":"x"}}]}',
    b'{"role":"assistant","content":"a"}',
    rb'{"role":"user","content":"half \ud83d of one"}',
    b'{"role":"user","content":"no text \xff"}',
    b'{"role":"user","content":5}',
    b'{"role":"user","content":"' + 60 * b"[" + b'"}',
    b"5",
    b"",
]
VALUES = (
    b"1",
    b"1.0",
    b"true",
    b"-0.0",
    b"0.0",
    b'"1"',
    b"null",
    b'{"b":1,"a":2}',
    b'{"a":2,"b":1}',
)
ITEMS: dict[str, list[bytes]] = {
    "/v1/chat/completions": [
        *(b'{"role":"user","content":"a","cost":%b}' % value for value in VALUES),
        *(
            b'{"role":"assistant","tool_calls":[{"id":"1","function":'
            b'{"name":"f","arguments":{"x":%b}}}]}' % value
            for value in VALUES
        ),
        rb'{"role":"assistant","tool_calls":[{"id":"1","function":{"name":"f","arguments":"{ }"}}]}',
        b'{"role":"tool","tool_call_id":"1","content":"5"}',
        b'{"role":"assistant","content":"a","reasoning_content":"b"}',
        b'{"role":"assistant","function_call":{"name":"f"}}',
    ],
    "/v1/messages": [
        *(
            b'{"role":"assistant","content":[{"type":"thinking","thinking":"b"},'
            b'{"type":"tool_use","id":"1","name":"f","input":{"x":%b}}]}' % value
            for value in VALUES
        ),
        b'{"role":"user","content":[{"type":"tool_result","tool_use_id":"1","content":"5"},'
        b'{"type":"text","text":"a"},{"type":"tool_result","tool_use_id":"2","content":"6"}]}',
        b'{"role":"user","content":[]}',
        b'{"role":"system","content":"a"}',
    ],
    "/v1/responses": [
        *(
            b'{"type":"function_call","call_id":"1","name":"f","arguments":"%b"}' % v
            for v in (b"1", b"1.0")
        ),
        b'{"type":"reasoning","summary":[{"type":"summary_text","text":"b"}]}',
        b'{"type":"reasoning","summary":[],"role":"user"}',
        b'{"type":"message","role":"assistant","content":[{"type":"output_text","text":"a"}]}',
        b'{"type":"message","role":"user","content":[{"type":"input_text","text":"a"}]}',
        b'{"type":"custom_tool_call","call_id":"2","name":"g","input":"{}"}',
        b'{"type":"custom_tool_call_output","call_id":"2","output":"5"}',
        b'{"type":"function_call_output","call_id":"1","output":"5"}',
        b'{"type":"function_call_output","call_id":"1","output":"5","role":"assistant","content":"a"}',
        b'{"type":null,"role":"user","content":"a"}',
        b'{"type":"message","content":"a"}',
        b'{"type":"web_search_call"}',
    ],
}
BODIES = [
    b'{"model":"m","%b":[%b],"max_tokens":9}',
    b'{ "%b" : [ %b ] , "tools":[{"type":"function","name":"f","input_schema":{}}]}',
    b'{"%b":[%b],"tools":[{"type":"function","function":{"name":"f"}}]}',
    b'{"input":[{"role":"user","content":"z"}],"messages":[],"%b":[%b]}',
    b'{"%b":[%b],"instructions":"be brief","system":"be brief"}',
    b'{"%b":[%b],"n":2,"background":true,"container":"x"}',
    b'{"%b":[%b]',
]


def conversations(items: Sequence[bytes]) -> Any:
    """Return a strategy of requests, each of which has a part of those before, or other items."""
    edit = st.tuples(
        st.integers(0, 9), st.integers(0, 40), st.lists(st.sampled_from(items), max_size=4)
    )
    return st.lists(st.tuples(st.sampled_from(BODIES), edit), min_size=1, max_size=8)


def asked(read: Any) -> tuple[str, Any]:
    """Return what is asked, or why it is refused, so that 1, 1.0 and true differ."""
    try:
        ask = read()
    except Refusal as refusal:
        return "refused", (refusal.status, str(refusal), refusal.field)
    return repr(ask.messages), repr((ask.tools, ask.instructions, ask.max_tokens))


@pytest.mark.parametrize("path", ITEMS)
def test_requests_are_read_as_if_each_were_the_first(path: str) -> None:
    kind = DIALECTS[path]
    whole = type("Whole", (kind,), {"history": ""})  # reads every request as a whole

    @settings(max_examples=examples(400), deadline=None)
    @given(conversations(ANYWHERE + ITEMS[path]))
    def check(requests: Any) -> None:
        known: Known = {}
        items: list[bytes] = []
        for body, (start, end, more) in requests:
            items = items[:start] + items[start + end // 5 :] + more
            filled = body % (kind.history.encode(), b",".join(items))
            again = asked(lambda body=filled: _parse(kind, body, known)[1])
            assert again == asked(lambda body=filled: _parse(whole, body, {})[1])

    check()


@settings(
    max_examples=examples(25),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    st.lists(
        st.tuples(st.sampled_from(EDITS), st.integers(0, 9), st.booleans(), st.just(1), st.none()),
        min_size=2,
        max_size=8,
    ),
    st.lists(LINES, min_size=1, max_size=6),
)
@example([("none", 0, False, 1, None)] * 8, [["yes"]])
def test_a_session_records_the_same_if_it_keeps_nothing_of_what_it_has_read(
    chat: Any, steps: list[Any], lines: list[list[str]]
) -> None:
    async def agent(task: AgentTask) -> None:
        await play(task, steps, [])

    recorded = []
    for each in (Continued.each, lambda self, items: list(map(self._work, items))):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(Continued, "each", each)
            engine = Recorder(chat, ["".join(lines[n % len(lines)]) for n in range(9)])
            states = run(loop_of(chat, agent, train="all"), engine, questions("x", max_tokens=9999))
        recorded.append(group_bytes.encode(RolloutGroup("math-0000000001", "math", states)))
    assert recorded[0] == recorded[1]


class Item:
    """An object that has the id of one before, as soon as that one is gone."""


def test_only_the_newest_list_is_kept_and_an_id_is_of_one_object() -> None:
    made = iter(range(10_000))
    continued = Continued[Item, int](lambda _: next(made))
    assert continued.each([]) == []
    item = Item()
    gone = weakref.ref(item)
    assert continued.each([item, Item()]) == [0, 1]
    assert continued.each([Item(), item]) == [2, 0]
    del item
    for n in range(3, 1000, 3):
        assert continued.each([Item(), Item(), Item()]) == [n, n + 1, n + 2]
    assert gone() is None
