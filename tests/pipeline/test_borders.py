"""What a user's code gets is its own: it ruins all that it can reach, at once and later.

Whatever it did, the next try, the next claim, its siblings and the store have what was drawn, and
what is stored is what the engine made.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import numpy as np
import openai
import pytest
from msgspec import structs
from pydantic import BaseModel

from buffer.control.control import Mode
from buffer.wire.group import GROUP_TIME, OPEN_SESSIONS, SESSIONS_RESTARTED, RolloutGroup
from buffer.wire.rollout import RolloutState, Status, ToolCall
from buffer.wire.sampling import SampleParams
from producer_workers.agent_loops.environment import Answer, Turn
from producer_workers.agent_loops.multi_turn import MultiTurnAgentLoop
from producer_workers.agent_loops.single_turn import SingleTurnAgentLoop
from producer_workers.config.distribution import Fixed
from producer_workers.config.engine import SimulatedConfig
from producer_workers.config.task import JudgingSection
from producer_workers.engines.base import Generation
from producer_workers.judges.judge import FunctionJudge, judge_call
from producer_workers.judges.watched_judges import WatchedJudges
from producer_workers.worker.task_runner import TaskRunner
from producer_workers.worker.worker import Worker
from rolloutmq.extensions.gateway.loop import GatewayAgentLoop
from rolloutmq.testing import END, Characters
from tests.pipeline.yard import FIRST, SOME, TASK, WatchedEngine, Yard

RECORDS = (GROUP_TIME, OPEN_SESSIONS, SESSIONS_RESTARTED)
LENGTHS = (8, 300, 300)
"""Tokens of the members: the first has ended when the others are interrupted."""


def drawn(index: int) -> dict[str, Any]:
    """Return the fields of a member that no code of a user may change for others."""
    length = LENGTHS[index]
    return {
        "messages": [{"role": "user", "content": "What?"}],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"a": [1]}}}],
        "data_source": "sums",
        "ground_truth": {"answer": ["4", {"or": [4.0]}]},
        "extra": {"tests": [["a", {"b": [1, 2]}]], "row": {"n": 1}},
        "sample_params": SampleParams(
            max_tokens=2 * length + 20, min_tokens=length, seed=index, stops=["x"]
        ),
        "prompt_ids": np.arange(1, 5, dtype="<i4"),
    }


def values_of(given: Any) -> dict[str, Any]:
    """Return a copy of what a rollout, or the task of an agent, has of `drawn`."""
    names = [name for name in drawn(0) if hasattr(given, name)]
    values = {name: copy.deepcopy(getattr(given, name)) for name in names}
    values["extra"] = {
        name: value for name, value in values["extra"].items() if name not in RECORDS
    }
    if "prompt_ids" in values:
        values["prompt_ids"] = values["prompt_ids"].tolist()
    return values


def expected(index: int, found: dict[str, Any]) -> dict[str, Any]:
    values = drawn(index) | {"prompt_ids": drawn(index)["prompt_ids"].tolist()}
    return {name: values[name] for name in found}


def ruin(value: Any, done: dict[int, Any] | None = None) -> None:
    """Change whatever can be reached."""
    done = {} if done is None else done
    if id(value) in done:
        return
    done[id(value)] = value
    if isinstance(value, np.ndarray):
        if value.flags.writeable:
            value[...] = 77
        return
    for part in list(_parts(value)):
        ruin(part, done)
    if isinstance(value, dict):
        value.update(dict.fromkeys(value, "ruined"), ruined=True)
    elif isinstance(value, list):
        value[:] = ["ruined", *value[1:3]]
    elif isinstance(value, RolloutState):
        for name in drawn(0):
            setattr(value, name, None)


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, list | tuple | set):
        yield from value
    elif isinstance(value, BaseModel):
        yield from vars(value).values()
    elif is_dataclass(value):
        yield from (getattr(value, field.name) for field in fields(value))


class Vandal:
    """A user's code: it notes what it gets, and ruins it, again and again.

    `fails`: raise at the first call for member 2, so that it is tried again within its claim.
    """

    def __init__(self) -> None:
        self.saw: list[tuple[int, dict[str, Any]]] = []
        self.kept: list[Any] = []
        self.fails = True

    def gets(self, index: int, *given: Any) -> None:
        """Note and ruin all of `given`, the first of which has fields of `drawn`."""
        self.saw.append((index, values_of(given[0])))
        self.kept += given
        ruin(given)

    def fail_once(self, index: int) -> None:
        if index == 2 and self.fails:
            self.fails = False
            raise ZeroDivisionError("once")

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Ruin everything again while the block runs."""

        async def work() -> None:
            while True:
                ruin(list(self.kept))
                await asyncio.sleep(0.005)

        task = asyncio.ensure_future(work())
        yield
        task.cancel()

    def check(self) -> None:
        assert self.saw
        for index, values in self.saw:
            assert values == expected(index, values)


class NotingEngine(WatchedEngine):
    """Notes what it made: tokens read, tokens sampled, logprobs. It `fills` max_tokens, or ends."""

    def __init__(self, *, fills: bool, held: bool) -> None:
        none = Fixed(value=0.0)
        config = SimulatedConfig(
            first_token_s=none,
            token_s=none,
            response_tokens=Fixed(value=1),
            vocab_size=95,
            eos_token_id=END,
        )
        super().__init__(config, FIRST, held=held)
        self.fills = fills
        self.made: list[tuple[list[int], list[int], list[float]]] = []

    async def generate(self, request_id: str, prompt_ids: Any, params: SampleParams) -> Generation:
        read = prompt_ids.tolist()
        if self.fills:
            params = structs.replace(params, min_tokens=params.max_tokens)
        made = await super().generate(request_id, prompt_ids, params)
        self.made.append((read, made.token_ids.tolist(), made.logprobs.tolist()))
        return made


def check_tokens(state: RolloutState, made: list[tuple[list[int], list[int], list[float]]]) -> None:
    assert state.prompt_ids is not None
    whole = [*state.prompt_ids.tolist(), *state.response_ids.tolist()]
    logprobs = [0.0] * len(state.prompt_ids) + state.logprobs.tolist()
    mask = np.ones(len(state.response_ids)) if state.response_mask is None else state.response_mask
    sampled = set[int]()
    for read, tokens, their_logprobs in made:
        end = len(read) + len(tokens)
        if whole[:end] == read + tokens and logprobs[len(read) : end] == their_logprobs:
            sampled.update(range(len(read), end))
    assert sampled == set((len(state.prompt_ids) + np.flatnonzero(mask)).tolist())


# -- the kinds of code ---------------------------------------------------------------------------

Parts = Callable[[Vandal], dict[str, Any]]
"""Returns arguments of `make_worker` that make it call the vandal."""


def judge(vandal: Vandal) -> dict[str, Any]:
    def score(*, response: str, ground_truth: Any, state: RolloutState) -> float:
        index = state.index
        vandal.gets(index, state, ground_truth)
        vandal.fail_once(index)
        return 1.0

    return {"judge": FunctionJudge("vandal", score)}


def judge_in_the_loop(vandal: Vandal) -> dict[str, Any]:
    async def score(*, response: str, ground_truth: Any, state: RolloutState) -> float:
        index = state.index
        vandal.gets(index, state, ground_truth)
        vandal.fail_once(index)
        return 1.0

    return {"judge": FunctionJudge("vandal", score)}


def ranking(vandal: Vandal) -> dict[str, Any]:
    def rank(states: list[RolloutState]) -> list[float]:
        for state in list(states):
            vandal.gets(state.index, state)
        vandal.fail_once(2)
        return [1.0] * len(LENGTHS)

    return {"judge": FunctionJudge("vandal", rank)}


def sample_filter(vandal: Vandal) -> dict[str, Any]:
    def keep(states: list[RolloutState]) -> bool:
        for state in list(states):
            vandal.gets(state.index, state)
        states.clear()
        return True

    return {"is_valid_sample": keep}


def agent_loop(vandal: Vandal) -> dict[str, Any]:
    class Loop(SingleTurnAgentLoop):
        async def generate_group(self, states: Any, engine: Any, gid: str) -> Any:
            begins = [s for s in states if not len(s.response_ids)]
            for state in begins:
                vandal.saw.append((state.index, values_of(state)))
            params = {state.index: copy.deepcopy(state.sample_params) for state in states}
            prompts = {state.index: state.prompt_ids for state in states}
            done = [state for state in states if state.status is Status.COMPLETED]
            vandal.kept += [state.response_ids for state in done]
            for state in states:
                ruin([state.messages, state.extra, state.ground_truth, state.tools])
                state.sample_params = params[state.index]
            made = await super().generate_group(states, engine, gid)
            vandal.kept += [vars(state) for state in made]
            for state in done:
                ruin(state)
            await asyncio.sleep(0)
            returned = [state.model_copy() for state in made]
            for state in returned:
                state.extra = {"ruined": [state.index]}
                state.messages = [{"role": "user", "content": "ruined"}]
                state.__dict__.update(ground_truth=None, sample_params=None, tools=None)
                state.prompt_ids = prompts[state.index]
                vandal.kept += [state.messages, state.response_ids, state.logprobs]
            if vandal.fails and returned[2].status is Status.COMPLETED:
                vandal.fails = False
                returned[2].status = Status.FAILED
                returned[2].prompt_ids = np.array([9], "<i4")
                returned[2].reward = None
            return returned

    return {"loop": Loop}


def environment(vandal: Vandal) -> dict[str, Any]:
    class World:
        async def answer(self, state: RolloutState, turn: Turn) -> Answer:
            index = state.index
            vandal.gets(index, state)
            vandal.fail_once(index)
            call = ToolCall(id="1", name="f", arguments={"a": [1]})
            answer = Answer([{"role": "user", "content": "on"}], [call])
            vandal.kept.append(answer)
            return answer

    return {"loop": MultiTurnAgentLoop, "environment": World(), "max_turns": 2}


def agent(vandal: Vandal) -> dict[str, Any]:
    """An agent of two turns, which appends to the lists that it got."""

    async def solve(task: Any) -> float:
        index = int(task.session_id.rpartition("/")[2])
        vandal.saw.append((index, values_of(task)))
        messages = task.finished[-1] if task.finished else task.messages
        if task.finished:
            assert messages[0] == drawn(0)["messages"][0], "its session is another one"
            assert len(messages) == 2
        async with openai.AsyncOpenAI(base_url=task.base_url, api_key=task.api_key) as client:
            while len(messages) < 4:
                if len(messages) == 2:
                    messages.append({"role": "user", "content": "on"})
                limit = 4 if len(messages) == 1 else LENGTHS[index] - 4
                reply = await client.chat.completions.create(
                    model="any", messages=messages, max_tokens=limit
                )
                messages.append({"role": "assistant", "content": reply.choices[0].message.content})
                vandal.kept.append(copy.copy(task.extra))
        vandal.kept.append(task)
        ruin(task)
        vandal.fail_once(index)
        return 1.0

    solve.resumable = True  # type: ignore[attr-defined]
    return {"loop": GatewayAgentLoop, "agent": solve, "judge": None}


KINDS = [
    judge, judge_in_the_loop, ranking, sample_filter, agent_loop, environment, agent
]  # fmt: skip


def make_worker(
    yard: Yard, name: str, *, partial: bool, held: bool = False, **parts: Any
) -> Worker:
    judges = WatchedJudges()
    if function := parts.pop("is_valid_sample", None):
        call = judge_call("filter", "filter", function, "filter", JudgingSection())
        function = judges.watch_filter("filter", call, 10.0)
    scorer = parts.pop("judge", FunctionJudge("one", lambda **_: 1.0))
    fills = fills_twice(parts)
    loop = parts.pop("loop", SingleTurnAgentLoop)(
        judge=scorer, tokenizer=Characters(), eos_ids={END}, partial_rollout=partial, **parts
    )
    engine = NotingEngine(fills=fills, held=held)
    runner = TaskRunner(loop, partial, function, judges=judges)
    worker = Worker(yard.run, engine, {TASK: runner}, worker_id=name)
    worker.engine = engine  # type: ignore[attr-defined]
    return worker


def fills_twice(parts: dict[str, Any]) -> bool:
    """Return whether each member makes a short request before its long one."""
    return "agent" in parts


@pytest.mark.parametrize("partial", [True, False], ids=["partial", "whole"])
@pytest.mark.parametrize("kind", KINDS)
async def test_code_that_ruins_what_it_gets_changes_nothing_of_others(
    yard: Yard, kind: Parts, partial: bool
) -> None:
    """Over a pause and a claim of another worker, and a failure within that claim."""
    vandal = Vandal()
    parts = kind(vandal)
    fields_of = [{**drawn(index), "index": index} for index in range(3)]
    (gid,) = yard.enqueue_states([RolloutState(**copy.deepcopy(each)) for each in fields_of])
    made: list[tuple[list[int], list[int], list[float]]] = []
    first = make_worker(yard, "w0", partial=partial, held=True, **parts)
    async with yard.working(first):
        engine: Any = first.engine  # type: ignore[attr-defined]
        ended = 4 if fills_twice(parts) else 1
        await yard.until_engine(lambda: len(engine.made) >= ended and engine.unfinished() == 2)
        engine.make(SOME)
        with vandal.at_work():
            await yard.receipts(yard.control(Mode.ABORT))
    made.extend(engine.made)
    check_group(yard.group(gid), made)
    yard.control(Mode.RUN)
    yard.reissue()
    second = make_worker(yard, "w1", partial=partial, **parts)
    with vandal.at_work():
        async with yard.working(second):
            await yard.until_stages(completed=1)
    made.extend(second.engine.made)  # type: ignore[attr-defined]
    vandal.check()
    assert kind is sample_filter or not vandal.fails, "nothing was tried again"
    group = yard.group(gid)
    assert group.status is Status.COMPLETED
    check_group(group, made, own_extra=kind is agent_loop)
    yard.check()


def check_group(
    group: RolloutGroup,
    made: list[tuple[list[int], list[int], list[float]]],
    *,
    own_extra: bool = False,
) -> None:
    for state in group.states:
        values = values_of(state)
        if own_extra:
            assert values.pop("extra") == {"ruined": [state.index]}
        elif state.extra.get("ruined"):
            values.pop("extra")  # of a loop whose rollout was interrupted
        if not isinstance(state.session_id, str):  # a session's prompt is what its segments share
            assert values["prompt_ids"] == drawn(0)["prompt_ids"].tolist()
        del values["prompt_ids"]
        assert values == expected(state.index, values)
        check_tokens(state, made)


class RuinsItself(SingleTurnAgentLoop):
    """Puts rubbish into every field of its rollouts, and holds them until heartbeats went by."""

    def __init__(self, yard: Yard, **given: Any) -> None:
        super().__init__(**given)
        self._yard = yard

    async def generate_group(
        self, states: list[RolloutState], engine: Any, gid: str
    ) -> list[RolloutState]:
        for state in states:
            for name in RolloutState.model_fields:
                if name != "index":
                    state.__dict__[name] = [[]]
        (record,) = self._yard.run.fleet.workers()
        while self._yard.run.fleet.workers()[0].seen_ms == record.seen_ms:
            await asyncio.sleep(0.01)
        return states


async def test_rubbish_in_a_loops_rollouts_fails_their_group_and_no_heartbeat(yard: Yard) -> None:
    yard.enqueue(1)
    worker = make_worker(yard, "w1", partial=False, loop=partial(RuinsItself, yard), judge=None)
    async with yard.working(worker):
        await yard.until(lambda: yard.stages().get("dead", 0) == 1)
