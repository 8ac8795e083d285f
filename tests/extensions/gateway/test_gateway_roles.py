from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import openai
import pytest

from buffer.wire import group_bytes
from buffer.wire.group import RolloutGroup
from buffer.wire.rollout import RolloutState, Status
from examples.self_play import play
from producer_workers.engines.base import Generation
from producer_workers.judges.judge import FunctionJudge
from producer_workers.worker.task_runner import restart
from rolloutmq.extensions.gateway import agent_sessions
from rolloutmq.extensions.gateway.agents import AgentTask
from rolloutmq.views.found_group import FoundGroup, group_parts
from tests.extensions.gateway.test_recorded_tokens import Killed, check
from tests.producer_workers.agents import ask
from tests.producer_workers.recorder import Recorder, loop_of, questions, run


async def self_play(task: AgentTask) -> dict[str, dict[str, Any]]:
    """Propose once; two solvers answer twice, at the same time."""
    proposer, solvers = task.role("proposer"), [task.role("solver", n) for n in (1, 2)]

    async def turns(of: AgentTask, question: str, count: int) -> str:
        (messages,) = of.finished or [[]]
        for _ in range(count - len(messages) // 2):
            messages = [*messages, {"role": "user", "content": question}]
            said = (await ask(of, messages)).message
            messages.append(said.model_dump(include={"role", "content"}))
        return str(messages[-1]["content"])

    problem = await turns(proposer, task.question, 1)
    await asyncio.gather(*(turns(solver, problem, 2) for solver in solvers))
    earned = {f"solver/{n}": {"score": float(n), "turn_rewards": [n, 0.5]} for n in (1, 2)}
    return {"proposer": {"score": -1.5}, **earned}


def stored(states: list[RolloutState]) -> list[RolloutState]:
    group = RolloutGroup("math-0000000001", "math", states)
    return group_bytes.decode(group_bytes.encode_checked(group)).states


def check_self_play(states: list[RolloutState], agents: int) -> None:
    assert [(s.index, s.role) for s in states] == [
        (n, role) for n in range(agents) for role in ("proposer", "solver", "solver")
    ]
    assert {s.status for s in states} == {Status.COMPLETED}
    assert [s.reward for s in states] == [{"score": n} for n in (-1.5, 1.0, 2.0)] * agents
    for state in states:
        ends = [turn.stop - 1 for turn in state.turns()]
        if state.role == "proposer":
            assert state.token_rewards is None
            continue
        assert state.reward is not None
        assert state.token_rewards is not None
        assert state.token_rewards[ends].tolist() == [state.reward["score"], 0.5]
        assert np.count_nonzero(state.token_rewards) == 2
    assert len({s.session_id for s in states}) == len(states)


def check_engine(engine: Recorder, states: list[RolloutState], agents: int) -> None:
    engine.check(states)
    assert len(engine.said) == 5 * agents, "no finished turn was sampled again"
    seeds = [params.seed for _, _, params in engine.requests]
    assert len(set(seeds)) == len(seeds) // agents, "no two sessions of a draw sample the same"


def test_roles_of_an_agent_are_rollouts_of_their_own_with_their_own_rewards(chat: Any) -> None:
    engine = Recorder(chat)
    states = run(loop_of(chat, self_play), engine, questions("a", "b", max_tokens=10_000))
    check_self_play(stored(states), 2)
    check_engine(engine, states, 2)
    shown = FoundGroup("x", group=RolloutGroup("math-0000000001", "math", states))
    parts = [str(part) for part in group_parts(shown.document(tokens=False))]
    assert all(any(f"#1 {role}" in part for part in parts) for role in ("proposer", "solver"))


@pytest.mark.parametrize("cut", range(5))
def test_an_agent_that_was_cut_goes_on_in_all_its_roles(chat: Any, cut: int) -> None:
    """Interrupted at each of its requests, and stored between two workers."""

    class Cut(Recorder):
        left = cut

        async def generate(self, request_id: str, *request: Any) -> Generation:
            self.left -= 1
            if self.left < 0:
                await asyncio.sleep(0.05)  # those that were asked before are answered
                return Generation(np.array([5], "<i4"), np.zeros(1, "<f4"), (), "abort")
            return await super().generate(request_id, *request)

    engine = Cut(chat)
    states = questions("a", max_tokens=10_000)
    options = {"partial_rollout": True, "resumable": True}
    states = stored(run(loop_of(chat, self_play, **options), engine, states))
    assert {state.status for state in states} == {Status.ABORTED}
    engine.left = 5
    states = stored(run(loop_of(chat, self_play, **options), engine, states))
    check_self_play(states, 1)
    check_engine(engine, states, 1)


@pytest.mark.parametrize("kept", range(7))
def test_an_agent_whose_worker_died_goes_on_in_all_its_roles(chat: Any, kept: int) -> None:
    """Killed after each turn that the server has, the agent's end among them."""
    engine = Recorder(chat)
    states = questions("a", max_tokens=10_000)
    options = {"partial_rollout": True, "resumable": True}
    keeper = Killed(states, kept)
    states = stored(
        run(loop_of(chat, self_play, **options), engine, states, keeper) or keeper.found()
    )
    before = check(engine, [state for state in states if len(state.response_ids)])
    states = stored(run(loop_of(chat, self_play, **options), engine, states))
    check_self_play(states, 1)
    assert before <= check(engine, states)


def test_a_role_that_fails_takes_all_roles_of_its_rollout_with_it(chat: Any) -> None:
    """One program leads them all, so they begin again together; other rollouts keep theirs."""
    failures = iter([True])

    async def agent(task: AgentTask) -> Any:
        earned = await self_play(task)
        if task.question == "b" and next(failures, False):
            raise ZeroDivisionError
        return earned

    engine = Recorder(chat)
    states = run(loop_of(chat, agent), engine, questions("a", "b", max_tokens=10_000))
    kept = [state.session_id for state in states[:3]]
    assert [(s.index, s.role, s.status.value) for s in states] == [
        *((0, role, "completed") for role in ("proposer", "solver", "solver")),
        (1, "", "failed"),
    ]
    states = run(loop_of(chat, agent), engine, restart(states, {1}))
    assert [s.session_id for s in states[:3]] == kept
    assert [s.role for s in states] == ["proposer", "solver", "solver"] * 2
    assert len(engine.said) == 15


@pytest.mark.parametrize(
    "earned",
    [
        {"proposer": {"score": 1}, "slover": {"score": 1}},
        {"proposer": {"score": 1}, "solver": {"score": 1, "turn_rewards": [1]}},
        {"proposer": {"score": 1}, "solver": {"score": 1, "turn_rewards": [1, "x"]}},
        {"proposer": {"score": 1}, "solver": {"score": 1, "token_rewards": [1, 2]}},
    ],
)
def test_rewards_that_fit_no_role_or_turn_fail_the_rollout(chat: Any, earned: Any) -> None:
    async def agent(task: AgentTask) -> Any:
        await self_play(task)
        return earned

    (state,) = run(loop_of(chat, agent), Recorder(chat), questions("a", max_tokens=1000))
    assert state.status is Status.FAILED
    assert state.error


def test_one_reward_is_of_all_roles_and_a_judge_adds_to_each(chat: Any) -> None:
    async def agent(task: AgentTask) -> float:
        await ask(task, task.messages)
        await self_play(task)
        return 1.0

    def judge(*, state: RolloutState, **_: Any) -> dict[str, Any]:
        assert state.response_mask is not None
        return {"score": len(state.role), "token_rewards": state.response_mask * 2}

    states = run(
        loop_of(chat, agent, judge=FunctionJudge("j", judge)),
        Recorder(chat),
        questions("a", max_tokens=1000),
    )
    states = stored(states)
    for state in states:
        assert state.response_mask is not None
        np.testing.assert_array_equal(state.token_rewards, state.response_mask * 2)
    assert [(s.role, s.reward) for s in states] == [
        (role, {"score": float(len(role))}) for role in ("", "proposer", "solver", "solver")
    ]


def test_the_example_rewards_sums_by_how_many_of_their_answers_are_right(chat: Any) -> None:
    engine = Recorder(chat, ["What is 12 + 30?", " 42", "42", "42", "43", "hello"])
    states = run(loop_of(chat, play), engine, questions("a sum", max_tokens=1000))
    engine.check(states)
    proposer, *solvers = [state.reward for state in states]
    assert proposer == {"score": 0.5, "solved": 0.75}
    assert sorted(reward["score"] for reward in solvers if reward) == [0, 1, 1, 1]
    (state,) = run(loop_of(chat, play), engine, questions("a sum", max_tokens=1000))
    assert (state.role, state.reward) == ("proposer", {"score": -1.0})


def test_a_key_opens_the_roles_of_its_own_agent_only(
    chat: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_sessions, "MOST_ROLES", 2)
    refused: list[int] = []

    async def agent(task: AgentTask) -> float:
        message = [{"role": "user", "content": "same"}]
        for name in ("a", "b", "a/0/1", "x y", "", "c"):
            try:
                await ask(task.role(name), message)
            except openai.APIStatusError as error:
                refused.append(error.status_code)
        await ask(task.role("a"), message)
        return 1.0

    engine = Recorder(chat)
    states = run(loop_of(chat, agent), engine, questions("x", max_tokens=1000))
    engine.check(states)
    assert refused == [400, 400, 400]
    assert [state.role for state in states] == ["", "a", "a", "b"]
