from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from typing import Any

import aiohttp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from buffer.wire import group_bytes
from buffer.wire.group import RolloutGroup
from buffer.wire.rollout import RolloutState, Status
from buffer.wire.sampling_mask import SamplingMask
from producer_workers.engines.base import Generation
from rolloutmq.extensions.gateway.agents import AgentTask
from rolloutmq.extensions.gateway.history import Conversation
from rolloutmq.extensions.gateway.kept_turns import TurnWriter, with_turns
from rolloutmq.extensions.gateway.segment import Segment
from rolloutmq.extensions.gateway.turn_keeper import TurnKeeper
from tests.producer_workers.agents import TOOL
from tests.producer_workers.recorder import Recorder, loop_of, questions, run
from tests.thoroughness import examples

CALL = '<tool_call>\n{"name": "add", "arguments": {"b": {"x": [1.0, "é"]}, "a": 2}}\n</tool_call>'
PIECES = ["", " ", "yes", "a\n", "<think>", "</think>", "<think>\nhm\n</think>\n\n", "[THINK]"]
LINES = st.lists(st.sampled_from([*PIECES, CALL, "<tool_call>", "</tool_call>"]), max_size=4)

DROP_THOUGHT = "drop thought"
EDITS = [
    "none", "none", "none", DROP_THOUGHT, "thought apart", "arguments anew", "rename", "one id",
    "change", "drop", "cut", "restart", "again",
]  # fmt: skip
STEPS = st.lists(
    st.tuples(
        st.sampled_from(EDITS),
        st.integers(0, 9),  # the message that is edited
        st.booleans(),  # tools are offered
        st.integers(1, 3),  # requests at once
        st.sampled_from([None, None, None, 0.0, 0.002, 0.004]),  # the first hangs up after this
    ),
    min_size=1,
    max_size=8,
)


class Witness(Recorder):
    """Aborts the requests of the numbers in `aborts`, and notes the seeds of the others."""

    def __init__(self, tokenizer: Any, lines: list[str], aborts: frozenset[int]) -> None:
        super().__init__(tokenizer, lines)
        self.aborts = aborts
        self.asked = 0
        self.seeds: dict[int, int] = {}

    async def generate(self, *request: Any) -> Generation:
        self.asked += 1
        if self.asked in self.aborts:
            return Generation(np.array([5], "<i4"), np.zeros(1, "<f4"), (), "abort")
        made = await super().generate(*request)
        self.seeds[len(self.said) - 1] = request[-1].seed
        return made


class Killed:
    """Keeps turns, and dies with its worker before it has kept turn `last` (None: it lives)."""

    def __init__(self, base: list[RolloutState], last: int | None) -> None:
        self.base = group_bytes.encode(RolloutGroup("math-0000000001", "math", base))
        self.turns: list[bytes] = []
        self.last = last
        self.trains_all = True
        self.died = asyncio.Event()

    def keep(self, turn: RolloutState) -> None:
        if len(self.turns) == self.last:
            self.died.set()
        if not self.died.is_set():
            group = RolloutGroup("math-0000000001", "math", [turn])
            self.turns.append(group_bytes.encode(group))

    async def stored(self) -> None:
        if self.died.is_set():
            await asyncio.Event().wait()

    def found(self) -> list[RolloutState]:
        turns = [group_bytes.decode(turn).states[0] for turn in self.turns]
        states = group_bytes.decode(self.base).states
        return with_turns(states, turns, "math-0000000001", trains_all=self.trains_all)


def check(engine: Recorder, states: list[RolloutState]) -> set[int]:
    """Check each trained token and its context; return the numbers of the trained requests."""
    trained: list[int] = []
    for state in states:
        assert state.prompt_ids is not None
        start = len(state.prompt_ids)
        ids = np.concatenate([state.prompt_ids, state.response_ids]).tolist()
        mask = np.zeros(len(state.response_ids), "u1")
        for span in state.spans:
            read, made = engine.read[span.version].tolist(), engine.said[span.version]
            end = span.start + span.length
            assert ids[: start + end] == [*read, *made.token_ids.tolist()]
            assert np.array_equal(state.logprobs[span.start : end], made.logprobs)
            assert isinstance(state.sampling_mask, SamplingMask)
            own, said = state.sampling_mask.part(slice(span.start, end)), made.sampling_mask
            assert isinstance(said, SamplingMask)
            assert np.array_equal(own.ids, said.ids)
            mask[span.start : end] += 1
            trained.append(span.version)
        known = state.response_mask
        assert np.array_equal(mask, np.ones_like(mask) if known is None else known)
        assert not state.logprobs[mask == 0].any()
        if isinstance(
            state.sampling_mask, SamplingMask
        ):  # a set for what was sampled, for nothing else
            assert np.array_equal(state.sampling_mask.counts, 2 * mask)
    assert len(set(trained)) == len(trained), "each turn is trained once"
    return set(trained)


def edited(messages: list[Any], edit: str, at: int) -> list[Any]:
    made: list[Any] = json.loads(json.dumps(messages))
    turns = [message for message in made if message["role"] == "assistant"]
    at %= max(1, len(made))
    for turn in turns:
        calls = turn.get("tool_calls") or []
        thought, end, text = turn["content"].rpartition("</think>")
        if edit in (DROP_THOUGHT, "thought apart") and end:
            turn["content"] = text
            if edit != DROP_THOUGHT:
                turn["reasoning_content"] = thought.removeprefix("<think>")
        for call in calls if edit == "arguments anew" else ():
            with suppress(json.JSONDecodeError):  # the model may have written no JSON
                arguments = json.loads(call["function"]["arguments"])
                call["function"]["arguments"] = json.dumps(arguments, indent=2, sort_keys=True)
    for message in made if edit in ("rename", "one id") else ():
        for holder, key in [(message, "tool_call_id"), *((c, "id") for c in calls_of(message))]:
            if key in holder:
                holder[key] = "x" if edit == "one id" else "x" + holder[key]
    if edit == "change" and made:
        made[at]["content"] += "!"
    if edit == "drop":
        made[at : at + 1] = []
    return made[: {"cut": at, "restart": 0}.get(edit, len(made))]


def calls_of(message: Any) -> list[Any]:
    return message.get("tool_calls") or []


async def play(task: AgentTask, steps: Any, answers: list[str]) -> None:
    """Play the rest of the steps; `answers` are the texts that arrived."""
    messages: list[Any] = list(task.finished[-1]) if task.finished else []
    headers = {"Authorization": f"Bearer {task.api_key}"}
    async with aiohttp.ClientSession(headers=headers) as http:

        async def ask(asked: list[Any], tools: bool, hang_up: float | None) -> Any:
            body = {"messages": asked, "tools": [TOOL] if tools else None, "max_tokens": 200}
            try:
                async with asyncio.timeout(hang_up):
                    url = f"{task.base_url}/chat/completions"
                    async with http.post(url, json=body) as reply:
                        said = await reply.json()
            except TimeoutError:
                return None
            assert reply.status in (200, 503), said
            if reply.status == 503:
                await asyncio.Event().wait()  # the gateway ends this agent
            message = said["choices"][0]["message"]
            answers.append(message["content"])
            return message

        for edit, at, tools, many, hang_up in steps:
            messages = edited(messages, edit, at)
            if edit == "again" and messages and messages[-1]["role"] == "assistant":
                messages.pop()  # the request for it
            if edit != "again" or not messages:
                results = [
                    {"role": "tool", "tool_call_id": call["id"], "content": "5"}
                    for call in (calls_of(messages[-1]) if messages else ())
                ]
                messages += results or [{"role": "user", "content": "and?"}]
            limits = [hang_up, *[None] * (many - 1)]
            said = await asyncio.gather(*(ask(messages, tools, limit) for limit in limits))
            if said[-1]:
                messages = [*messages, said[-1]]


@settings(
    max_examples=examples(25),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    STEPS,
    st.lists(LINES, min_size=1, max_size=6),
    st.frozensets(st.integers(1, 12), max_size=4),
    st.lists(st.integers(0, 4), max_size=4),
)
def test_the_record_is_what_was_read_and_sampled_whatever_clients_do_and_where_they_are_cut(
    chat: Any, steps: list[Any], lines: list[list[str]], aborts: frozenset[int], kills: list[int]
) -> None:
    """`aborts`: requests at which a pause ends all; `kills`: after how many turns a worker dies."""
    engine = Witness(chat, ["".join(lines[n % len(lines)]) for n in range(50)], aborts)
    answers: list[str] = []
    rest = iter(steps)

    async def agent(task: AgentTask) -> None:
        await play(task, rest, answers)

    states = questions("x", max_tokens=10_000)
    kept: set[int] = set()
    deaths = iter(kills)
    for _ in range(len(aborts) + len(kills) + 2):
        loop = loop_of(chat, agent, partial_rollout=True, resumable=True, train="all")
        keeper = Killed(states, next(deaths, None))
        made = run(loop, engine, states, keeper)
        group = RolloutGroup("math-0000000001", "math", made or keeper.found())
        states = group_bytes.decode(group_bytes.encode(group)).states
        assert states[0].error is None or not answers
        sampled = [state for state in states if len(state.response_ids)]
        trained = check(engine, sampled)
        assert kept <= trained, "a resumed session keeps its turns"
        kept = trained
        if states[0].status is not Status.ABORTED:
            break
    assert len(kept) >= len(answers)
    seeds = [engine.seeds[number] for number in kept]
    assert len(set(seeds)) == len(seeds), "no two turns have the same seed"


def test_a_turn_that_was_sampled_while_its_agent_failed_belongs_to_no_later_run_of_it() -> None:
    keeper = Killed(questions("a"), None)
    writer = TurnWriter(keeper, 0, {})
    made = Generation(np.array([5], "<i4"), np.zeros(1, "<f4"), (), "stop")
    said = {"role": "assistant", "content": "x"}
    first = Segment.begin([], Conversation.of([]), None, [1]).add_turn(made, said, "x", [])
    writer.sampled("", None, first, "")
    writer.failed()
    writer.sampled("", first, first.add_turn(made, said, "x", []), "")
    (state,) = keeper.found()
    assert not len(state.response_ids)


def test_no_agent_gets_a_turn_whose_storing_failed_in_any_way() -> None:
    async def scene() -> None:
        nothing: Any = None  # any use of it is a fault of the program
        keeper = TurnKeeper(nothing, nothing, nothing)
        for _ in range(2):
            keeper.keep(questions("a")[0])
            with pytest.raises(AttributeError):
                await keeper.stored()

    asyncio.run(scene())
