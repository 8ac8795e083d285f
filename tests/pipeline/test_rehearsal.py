from __future__ import annotations

import asyncio
import random
import re
from functools import partial
from typing import Any

import numpy as np
import pytest

from buffer.redis.store import Store
from buffer.wire.rollout import FIRST_WEIGHTS, RolloutState, Status, VersionSpan
from producer_workers.agent_loops.single_turn import SingleTurnAgentLoop
from producer_workers.config.distribution import Fixed
from producer_workers.config.engine import SimulatedConfig
from producer_workers.engines.base import Engine, EngineDeadError
from producer_workers.engines.simulated import SimulatedEngine
from producer_workers.worker import worker
from rolloutmq.testing import RehearsalError, rehearse

SUMS = [{"question": f"{n} + {n} = ?", "answer": str(2 * n)} for n in range(5)]


class Polite(SingleTurnAgentLoop):
    """A loop of a user's: as the single turn, and then says goodbye."""

    async def generate_group(
        self, states: list[RolloutState], engine: Engine, gid: str
    ) -> list[RolloutState]:
        for state in await super().generate_group(states, engine, gid):
            state.extra = {**state.extra, "goodbye": gid}
        return states


class Endless(Polite):
    async def generate_group(
        self, states: list[RolloutState], engine: Engine, gid: str
    ) -> list[RolloutState]:
        await asyncio.sleep(3600)
        return states


def length(*, response: str, ground_truth: str, state: RolloutState) -> float:
    return float(len(response) + len(ground_truth))


@pytest.mark.parametrize("loop", [Polite, "tests.pipeline.test_rehearsal:Polite"])
def test_groups_come_back_in_the_order_of_the_problems(loop: Any) -> None:
    groups = rehearse(SUMS, judge=length, agent_loop=loop, samples=3)
    assert [group.states[0].ground_truth for group in groups] == [
        problem["answer"] for problem in SUMS
    ]
    assert [group.scores.tolist() for group in groups] == [
        [32.0 + len(problem["answer"])] * 3 for problem in SUMS
    ]
    assert {state.extra["goodbye"] for state in groups[0].states} == {groups[0].gid}


def test_a_rehearsal_repeats_itself_and_leaves_nothing_behind() -> None:
    first, second = (rehearse(SUMS, judge="exact_match") for _ in range(2))
    assert [g.response_ids.tolist() for g in first] == [g.response_ids.tolist() for g in second]
    store = Store("memory://rehearsal")
    assert list(store.client.scan_iter("rmq:*:payload:*")) == []
    store.close()


class Forgets:
    """A loop that forgets the things it is asked to forget."""

    def __init__(
        self, *, judge: Any, tokenizer: Any, eos_ids: Any, partial_rollout: bool, what: str = ""
    ) -> None:
        self.what = what

    async def generate_group(self, states: list[RolloutState], engine: Engine, gid: str) -> Any:
        async with asyncio.TaskGroup() as rollouts:
            for state in states:
                rollouts.create_task(self.run(state, engine, f"{gid}/{state.index}"))
        forgotten = {"states": None, "a rollout": states[:1]}
        return forgotten.get(self.what, states)

    async def run(self, state: RolloutState, engine: Engine, name: str) -> None:
        assert state.prompt_ids is not None
        made = await engine.generate(name, state.prompt_ids, state.sample_params)
        state.append(made.token_ids, made.logprobs, made.spans)
        state.read(np.arange(3, dtype="<i4"))
        state.reward = {"score": 1.0}
        state.status = Status.COMPLETED
        match self.what:
            case "status":
                state.status = Status.INIT
            case "reward" | "score":
                state.reward = {"score": 1e39} if self.what == "score" else None
            case "spans":
                state.spans = []
            case "mask":
                state.response_mask = None
            case "logprobs":
                state.logprobs = made.logprobs
            case "prompt" | "all prompts":
                state.prompt_ids = state.prompt_ids[state.index if self.what == "prompt" else 1 :]
            case "weights":
                state.spans = [VersionSpan(0, len(made.token_ids), 77, "invented")]
            case "errors":
                raise KeyError("mine")


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("states", "the agent loop returned None"),
        ("a rollout", r"returned nothing for the rollouts \[1\]"),
        ("status", "rollout 0 came back with status init"),
        ("reward", "rollout 0 is completed without a reward"),
        ("spans", "rollout 0 trains 32 tokens, but its spans do not cover"),
        ("mask", "rollout 0 trains 35 tokens, but its spans do not cover"),
        ("logprobs", "differ in length"),
        ("prompt", "rollout 1 has another prompt than rollout 0"),
        ("all prompts", "the agent loop changed the prompt"),
        ("weights", "spans name weights that sampled nothing here: invented:77"),
        ("score", "the range of float32"),
        ("errors", "KeyError: 'mine'"),
    ],
)
def test_what_a_loop_forgets_is_reported(what: str, message: str) -> None:
    with pytest.raises(RehearsalError, match=message):
        rehearse(SUMS, judge=length, agent_loop=partial(Forgets, what=what))


def broken(**_: Any) -> float:
    raise ValueError("no verifier here")


def test_what_the_judge_raises_is_reported() -> None:
    with pytest.raises(RehearsalError, match="'broken' raised ValueError: no verifier here"):
        rehearse(SUMS, judge=broken)


@pytest.mark.parametrize("loop", ["single_turn", Forgets])
def test_an_engine_that_dies_ends_the_rehearsal(loop: Any) -> None:
    """Also where a loop's TaskGroup wraps what the engine raised."""
    engine = SimulatedEngine(SimulatedConfig(token_s=Fixed(value=0.0), die_after=1), FIRST_WEIGHTS)
    with pytest.raises(EngineDeadError):
        rehearse(SUMS, judge=length, engine=engine, agent_loop=loop)


def test_a_loop_without_end_is_an_error_that_names_the_stages_of_its_groups(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker, "HAND_BACK_S", 0.1)
    for limit_s in (0.5, 4.0, 32.0, 256.0):  # until one is long enough for groups to start
        with pytest.raises(RehearsalError, match=f"after {limit_s:g} s; groups by stage") as raised:
            rehearse(SUMS, judge=length, agent_loop=Endless, timeout_s=limit_s)
        if "'running': " in str(raised.value):
            return
    raise AssertionError(raised.value)


calls: list[str] = []


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"answer": "3"}, "problems, row 2: there is no prompt"),
        ({"question": "q", "answer": 2**70}, 'problems, row 2: "answer" is an integer'),
        ({"question": "q", "answer": random.Random(1).randbytes(2**21)}, "1 problems were passed"),
    ],
)
def test_a_problem_that_cannot_be_used_ends_the_rehearsal_with_its_reason(
    row: dict[str, Any], reason: str
) -> None:
    """At once: with the old wait for the whole batch, this test would take an hour."""
    with pytest.raises(RehearsalError, match=re.escape(reason)):
        rehearse([*SUMS[:2], row], judge=length, timeout_s=3600)
