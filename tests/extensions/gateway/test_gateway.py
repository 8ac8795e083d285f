from __future__ import annotations

import asyncio
import re
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from numpy.typing import NDArray

from buffer.errors import ConfigError
from buffer.ids import new_nonce
from buffer.redis.store import Store
from buffer.wire import group_bytes
from buffer.wire.group import RolloutGroup
from buffer.wire.rollout import FIRST_WEIGHTS, RolloutState, Status
from producer_workers.agent_loops.agent_loop import load_agent_loop
from producer_workers.agent_loops.tokenizer import TaskTokenizer
from producer_workers.engines.base import EngineDeadError, Generation
from producer_workers.judges.judge import FunctionJudge
from rolloutmq.extensions.gateway.agents import AgentTask
from rolloutmq.extensions.gateway.loop import GatewayAgentLoop
from rolloutmq.extensions.gateway.section import GatewaySection
from rolloutmq.testing import RehearsalError, rehearse
from tests.buffer.scene import Scene
from tests.extensions.gateway.test_recorded_tokens import Killed
from tests.producer_workers.agents import PROGRAM, TOOL, ask
from tests.producer_workers.recorder import MINE, Recorder, loop_of, questions, run

CALL = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'


def test_whatever_agents_do_each_sampled_token_is_trained_once_in_the_context_it_was_sampled_in(
    chat: Any,
) -> None:
    engine = Recorder(chat)
    given = questions(*(f"question {n}" for n in range(24)), max_tokens=10_000)
    states = run(loop_of(chat, train="all"), engine, given)
    assert len(engine.said) > 60
    assert len(states) > 24 + 10, "they cut, edited and asked twice"
    engine.check(states)
    assert {state.status for state in states} == {Status.COMPLETED}
    by_session: dict[int, set[tuple[str | None, float]]] = {}
    for state in states:
        assert state.reward is not None
        by_session.setdefault(state.index, set()).add((state.session_id, state.reward["score"]))
    assert all(len(facts) == 1 for facts in by_session.values())
    # what the task says is what the trainer counts on; and no two requests have the same seed
    assert {params.temperature for *_, params in engine.requests} == {1.0}
    assert len(
        {(name.rpartition("/")[0], params.seed) for name, _, params in engine.requests}
    ) == len(engine.requests)


@pytest.mark.parametrize(
    ("agent", "deed", "limit_s"),
    [
        ("harms", "exits", 600.0),
        pytest.param("harms_threads", "exits", 600.0, marks=pytest.mark.slow),
        pytest.param("harms", "blocks", 10.0, marks=pytest.mark.slow),
        pytest.param("harms_threads", "locks", 10.0, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("resumable", [False, True])
def test_an_agent_that_ends_or_blocks_its_process_fails_its_own_rollout_alone(
    chat: Any, agent: str, deed: str, limit_s: float, resumable: bool, monkeypatch: Any
) -> None:
    monkeypatch.setattr("rolloutmq.extensions.gateway.agents.GRACE_S", 2.0)
    engine = Recorder(chat)
    loop = loop_of(
        chat, MINE + agent, time_limit_s=limit_s, resumable=resumable, partial_rollout=True
    )
    given = questions(deed, *(f"question {n}" for n in range(7)), max_tokens=1000)
    keeper = Killed(given, None) if resumable else None
    culprit, *others = run(loop, engine, given, keeper)
    assert culprit.status is Status.FAILED
    said = "ended its process: exit code 3" if deed == "exits" else "exceeded its limit of 10 s"
    assert said in str(culprit.error)
    assert [state.reward for state in others] == [{"score": 1.0}] * 7
    if keeper:
        assert len(engine.said) == 8, "those that began again went on behind their turns"
        found = keeper.found()[1:]
        assert [s.response_ids.tolist() for s in found] == [s.response_ids.tolist() for s in others]
    else:
        assert len(engine.said) > 9, "some began again, since they shared its process"


def test_tool_calls_of_an_agent_stay_in_one_segment(chat: Any) -> None:
    engine = Recorder(chat, [f"let me see {CALL}{CALL}", "it is 5"])

    def judge(*, response: str, state: RolloutState, **_: Any) -> float:
        return float(response == "\ufffdit is 5" and len(state.tool_calls) == 2)

    (state,) = run(
        loop_of(chat, "calculate", judge=FunctionJudge("j", judge)), engine, questions("2 + 3?")
    )
    engine.check([state])
    assert state.reward == {"score": 1.0}
    assert [span.version for span in state.spans] == [0, 1], "the second turn had later weights"
    assert [(call.name, call.arguments) for call in state.tool_calls] == [
        ("add", {"a": 2, "b": 3})
    ] * 2
    text = chat.decode(state.response_ids)
    between = "<|im_end|>\n<|im_start|>tool\n5<|im_end|>\n<|im_start|>tool\n5<|im_end|>\n<|im_start|>assistant\n"
    assert text == f"\ufffdlet me see {CALL}{CALL}{between}\ufffdit is 5<|im_end|>"


@pytest.mark.parametrize("train", ["task", "all"])
@pytest.mark.parametrize(("turns", "writer"), [(1, False), (2, False), (2, True)])
def test_the_judge_sees_the_last_turn_of_the_conversation_with_tools_and_no_title_that_was_late(
    chat: Any, turns: int, writer: bool, train: str
) -> None:
    asked: list[str] = []

    class Late(Recorder):
        """Answers a question for a title after all others."""

        async def generate(self, request_id: str, ids: NDArray[np.int32], *more: Any) -> Generation:
            kind = re.findall(r"main|title|report", chat.decode(ids))[-1]
            asked.append(kind)
            while kind == "title" and len(self.said) < turns + writer:
                await asyncio.sleep(0.005)
            self.lines = [kind] * 9
            return await super().generate(request_id, ids, *more)

    async def solve(task: AgentTask) -> None:
        async def said(messages: list[Any], **more: Any) -> Any:
            return (await ask(task, messages, max_tokens=100, **more)).message

        title = asyncio.create_task(said([{"role": "user", "content": "title"}]))
        while not asked:
            await asyncio.sleep(0.005)
        messages: list[Any] = []
        for _ in range(turns):
            messages.append({"role": "user", "content": "main"})
            messages.append(await said(messages, tools=[TOOL]))
        if writer:
            await said([{"role": "user", "content": "report"}])
        await title

    judge = FunctionJudge("j", lambda *, response, **_: float(response.endswith("main")))
    engine = Late(chat)
    loop = loop_of(chat, agent=solve, judge=judge, train=train)
    states = run(loop, engine, questions("x", max_tokens=1000))
    engine.check(states, range(turns, turns + 1 + writer) if train == "task" else ())
    assert [state.reward for state in states] == [{"score": 1.0}] * (2 + writer)
    assert states[0].extra["new_contexts"]["other_tools"] == 1 + writer


@pytest.mark.parametrize("sees_group", [False, True])
def test_a_group_that_only_waits_for_its_judge_has_its_finish_reasons(
    chat: Any, sees_group: bool
) -> None:
    given = questions("one", "two", max_tokens=1000)
    seen: list[list[str | None]] = []

    async def single(*, response: str, **_: Any) -> float:
        async with asyncio.timeout(400):
            while not all(state.finish_reason for state in given):
                await asyncio.sleep(0.05)
        seen.append([state.finish_reason for state in given])
        return 1.0

    async def group(*, states: list[RolloutState]) -> list[float]:
        return [await single(response=state.response) for state in states]

    judge = FunctionJudge("slow", group if sees_group else single)
    run(loop_of(chat, judge=judge), Recorder(chat), given)
    assert seen == [["stop", "stop"]] * 2


def test_an_agent_that_stops_before_an_observation_reads_none_and_all_that_was_sampled_is_trained(
    chat: Any,
) -> None:
    engine = Recorder(chat, [f"I look. {CALL}\nSeen:", "it is 5"])
    (state,) = run(loop_of(chat, "reason_and_act"), engine, questions("2 + 3?"))
    engine.check([state])
    assert f"{CALL}\nSeen:<|im_end|>\n<|im_start|>user\nSeen: 5<|im_end|>" in chat.decode(
        state.response_ids
    )


@pytest.mark.slow
def test_a_program_runs_unchanged_through_a_whole_run(chat: Any, tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(PROGRAM, encoding="utf-8")
    engine = Recorder(chat)
    engine.now = FIRST_WEIGHTS
    loop = partial(
        GatewayAgentLoop, command=[sys.executable, str(tmp_path / "agent.py"), "{question}"]
    )
    problem = {"question": "2 + 2 = ?", "answer": "4"}
    given: dict[str, Any] = {"tokenizer": chat, "engine": engine}
    (group,) = rehearse([problem], judge=lambda **_: 0.5, agent_loop=in_chat(loop, chat), **given)
    assert [(s.index, str(s.session_id)[-2:]) for s in group.states] == [
        (0, "/0"),
        (0, "/0"),
        (1, "/1"),
        (1, "/1"),
    ]
    assert group.scores.tolist() == [0.5] * 4
    assert [group.sessions.index(session) for session in group.sessions] == [0, 0, 2, 2]
    engine.check([s.model_copy(update={"response_mask": _mask(s)}) for s in group.states])
    with pytest.raises(RehearsalError, match="exited with 1: cannot go on"):
        rehearse(
            [{"question": "fail", "answer": ""}],
            judge=lambda **_: 0.0,
            agent_loop=in_chat(loop, chat),
            **given,
        )


def in_chat(loop: Any, tokenizer: Any) -> Any:
    """End turns with this tokenizer's token, where a rehearsal's engine uses token 0."""
    return lambda **given: loop(**{**given, "eos_ids": {tokenizer.eos_token_id}})


def _mask(state: RolloutState) -> NDArray[np.uint8]:
    return (
        np.ones(len(state.response_ids), "u1")
        if state.response_mask is None
        else state.response_mask
    )


def test_interrupted_sessions_start_anew_elsewhere_and_ended_ones_are_kept(chat: Any) -> None:
    first = Recorder(chat)
    second = Recorder(chat)
    first.cut = {1, 4, 5}
    states = run(
        loop_of(chat, partial_rollout=True, train="all"),
        first,
        questions(*"abcdefgh", max_tokens=10_000),
    )
    assert {state.index for state in states if state.status is Status.ABORTED} == first.cut
    assert {state.index for state in states if state.status is Status.COMPLETED} == set(
        range(8)
    ) - first.cut
    assert all(
        not len(s.response_ids) and s.reward is None for s in states if s.status is Status.ABORTED
    )
    kept = {
        state.index: _texts(states, state.index)
        for state in states
        if state.status is Status.COMPLETED
    }
    states = run(loop_of(chat, partial_rollout=True, train="all"), second, states)
    assert {state.status for state in states} == {Status.COMPLETED}
    assert {state.index for state in states} == set(range(8))
    assert all(_texts(states, index) == texts for index, texts in kept.items())
    second.check([state for state in states if state.index not in kept])


async def counts_turns(task: AgentTask) -> float:
    """Ask four times in two contexts, and go on from where an earlier run of it ended."""
    finished: list[Any] = [list(messages) for messages in task.finished]
    for turn in range(sum(len(messages) // 2 for messages in finished), 4):
        if turn % 2 == 0:
            finished.append([])
        messages = finished[-1]
        messages.append({"role": "user", "content": f"{task.question} {turn}"})
        said = (await ask(task, messages)).message
        messages.append(said.model_dump(include={"role", "content"}))
    return 1.0


@pytest.mark.parametrize("judge", [None, FunctionJudge("j", lambda *, states: [1.0] * len(states))])
def test_a_resumable_session_is_continued_behind_its_turns_by_another_worker(
    chat: Any, judge: Any
) -> None:
    """Interrupted at turn 1, 2 or 3, in the middle of a group, and stored between the workers."""

    class Cut(Recorder):
        at: dict[int, int]

        async def generate(self, request_id: str, *request: Any) -> Generation:
            _, session, number = request_id.split("/")
            if int(number) >= self.at.get(int(session), 10_000):
                return Generation(np.array([5], "<i4"), np.zeros(1, "<f4"), (), "abort")
            return await super().generate(request_id, *request)

    options = {"agent": counts_turns, "partial_rollout": True, "resumable": True, "judge": judge}
    engine = Cut(chat)
    states = questions(*"abc", max_tokens=10_000)
    for at in ({0: 1, 1: 3, 2: 0}, {1: 3, 2: 2}, {}):
        engine.at = at
        group = RolloutGroup(
            "math-0000000001", "math", run(loop_of(chat, **options), engine, states)
        )
        states = group_bytes.decode(group_bytes.encode(group)).states
    assert {state.status for state in states} == {Status.COMPLETED}
    assert [state.index for state in states] == [0, 0, 1, 1, 2, 2]
    engine.check(states)
    assert len(engine.said) == 12, "no finished turn was sampled again"
    assert {state.finish_reason for state in states} == {"stop"}
    assert "open_sessions" not in states[0].extra
    seeds = [(name.split("/")[1], params.seed) for name, _, params in engine.requests]
    assert len(set(seeds)) == 12


@pytest.mark.parametrize("ends", ["pauses", "deaths"])
def test_responses_are_known_to_the_next_workers(chat: Any, ends: str) -> None:
    engine = Recorder(chat)
    told: list[Any] = []

    async def solve(task: AgentTask) -> None:
        client = openai.AsyncOpenAI(base_url=task.base_url, api_key=task.api_key, max_retries=0)
        async with client:
            for response in told:
                found = await client.responses.retrieve(response.id)
                assert (found.output, found.usage) == (response.output, response.usage)
            while len(told) < 4:
                before = {"previous_response_id": told[-1].id} if told else {}
                new: Any = {"input": f"part {len(told)}", "instructions": "be brief", **before}
                told.append(await client.responses.create(model="m", **new))

    states = questions("a", max_tokens=10_000)
    for life in range(1, 4):
        engine.cut = {0} if ends == "pauses" and life < 3 else set()
        keeper = Killed(states, 2 - life % 2 if ends == "deaths" and life < 3 else None)
        loop = loop_of(chat, solve, partial_rollout=True, resumable=True)
        group = RolloutGroup(
            "math-0000000001", "math", run(loop, engine, states, keeper) or keeper.found()
        )
        states = group_bytes.decode(group_bytes.encode(group)).states
    (state,) = states
    assert state.status is Status.COMPLETED
    turns = [chat.decode(state.response_ids[turn][:-1]) for turn in state.turns()]
    assert turns == [response.output_text for response in told]
    assert "new_contexts" not in states[0].extra


def test_a_session_that_begins_again_is_counted_in_the_record_of_its_group(chat: Any) -> None:
    engine = Recorder(chat)
    engine.cut = {0, 1}
    states = questions("a", "b", max_tokens=10_000)
    states = run(loop_of(chat, counts_turns, partial_rollout=True), engine, states)
    assert states[0].extra == {"sessions_restarted": 2}
    seen: list[dict[str, Any]] = []

    async def looks(task: AgentTask) -> float:
        seen.append(task.extra)
        return await counts_turns(task)

    engine.cut = set()
    states = run(loop_of(chat, looks, partial_rollout=True), engine, states)
    assert {state.status for state in states} == {Status.COMPLETED}
    assert states[0].extra == {"sessions_restarted": 2, "new_contexts": {"conversation": 2}}
    assert seen == [{}, {}]


def _texts(states: list[RolloutState], index: int) -> list[list[int]]:
    chosen = [s for s in states if s.index == index and s.prompt_ids is not None]
    return [np.concatenate([np.asarray(s.prompt_ids), s.response_ids]).tolist() for s in chosen]


def test_a_session_ends_with_its_budget_and_that_is_no_failure(chat: Any) -> None:
    engine = Recorder(chat)
    (state,) = run(loop_of(chat, "talks_for_ever"), engine, questions("go", max_tokens=40))
    engine.check([state])
    assert (state.status, state.reward) == (Status.COMPLETED, {"score": 0.0})
    assert sum(len(made.token_ids) for made in engine.said) == 40


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
def test_a_call_that_an_agent_demands_is_enforced_or_refused(chat: Any, choice: Any) -> None:
    async def demands(task: AgentTask) -> None:
        made = await ask(task, task.messages, tools=[TOOL], tool_choice=choice)
        assert made.finish_reason == "tool_calls"
        made = await ask(task, task.messages, tools=[TOOL], tool_choice="none")
        assert str(made.message.content).endswith(CALL)

    class Enforcing(Recorder):
        structures_output = True

    line = CALL.replace("<tool_call>", "<tool_call>\n").replace("</tool_call>", "\n</tool_call>")
    engine = Enforcing(chat, [line, CALL])
    (state,) = run(loop_of(chat, agent=demands), engine, questions("x"))[:1]
    assert state.status is Status.COMPLETED
    structures = [params.structured for *_, params in engine.requests]
    assert structures[0] is not None
    assert re.fullmatch(str(structures[0].regex), line)
    assert structures[1] is None
    for parser, kind in (("", Enforcing), ("hermes", Recorder)):
        (state,) = run(loop_of(chat, agent=demands, parser=parser), kind(chat), questions("x"))
        assert state.status is Status.FAILED
        assert "tool_choice" in str(state.error)


@pytest.mark.parametrize("own", [[], [{"role": "system", "content": "mine"}]])
def test_a_system_prompt_and_template_arguments_of_the_task_reach_agents(
    chat: Any, own: list[dict[str, str]]
) -> None:
    chat.chat_template = chat.chat_template.replace(
        "<|im_start|>assistant\n{%", "<|im_start|>assistant\n{% if calm %}Well, {% endif %}{%"
    )

    async def asks_twice(task: AgentTask) -> None:
        messages: list[Any] = [*own, *task.messages]
        messages += [(await ask(task, messages)).message, {"role": "user", "content": "sure?"}]
        await ask(task, messages)

    engine = Recorder(chat, ["one", "two"])
    tokenizer = TaskTokenizer(chat, {"calm": True}, "be brief")
    (state,) = run(loop_of(tokenizer, agent=asks_twice), engine, questions("x"))
    engine.check([state])
    first = chat.decode(engine.read[0])
    system = own[0]["content"] if own else "be brief"
    assert first == (
        f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\nx<|im_end|>\n"
        "<|im_start|>assistant\nWell, "
    )
    second = chat.decode(engine.read[1])
    assert second.startswith(first), "one segment"
    assert second.endswith("sure?<|im_end|>\n<|im_start|>assistant\nWell, ")


@pytest.mark.parametrize("judge", [None, FunctionJudge("j", lambda **_: 0.5)])
def test_a_session_ends_with_the_context_of_the_engine_and_is_judged(chat: Any, judge: Any) -> None:
    engine = Recorder(chat)
    engine.max_model_len = 200
    (state,) = run(loop_of(chat, "talks_for_ever", judge=judge), engine, questions("go"))
    engine.check([state])
    assert (state.status, state.finish_reason) == (Status.COMPLETED, "length")
    assert state.reward == {"score": 0.5 if judge else 0.0}
    (state,) = run(loop_of(chat, "talks_for_ever"), engine, questions("go " * 80))
    assert state.status is Status.FAILED
    assert "maximum context length is 200 tokens" in str(state.error)


@pytest.mark.parametrize(
    ("agent", "reason"),
    [
        ("raises", "raised ZeroDivisionError: by the agent"),
        ("asks_nothing", "without an answer of the model"),
        ("never_ends", "exceeded its limit of 0.05 s"),
    ],
)
def test_an_agent_that_goes_wrong_fails_its_rollout_and_says_why(
    chat: Any, agent: str, reason: str
) -> None:
    (state,) = run(loop_of(chat, agent, time_limit_s=0.05), Recorder(chat), questions("x"))
    assert state.status is Status.FAILED
    assert reason in str(state.error)


def test_plain_functions_that_wait_take_no_threads_of_the_worker(chat: Any) -> None:
    """The worker needs that pool to load weights and submit groups."""
    meeting = threading.Barrier(40)

    def meet(task: AgentTask) -> float:
        meeting.wait(400)
        return 1.0

    states = run(loop_of(chat, agent=meet), Recorder(chat), questions(*map(str, range(40))))
    assert {str(state.error) for state in states} == {
        "the agent ended without an answer of the model"
    }


def test_a_dead_engine_is_the_workers_matter(chat: Any) -> None:
    engine = Recorder(chat)
    engine.dead = True
    with pytest.raises(EngineDeadError):
        run(loop_of(chat), engine, questions("x"))


def test_options_are_checked_when_the_loop_is_made(
    chat: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vllm.tool_parsers", None)  # as where it is not installed
    given: dict[str, Any] = {"judge": None, "tokenizer": chat, "eos_ids": [2]}
    for told, options in {
        "an agent or a command": {},
        "no tool parser": {"agent": MINE + "wander", "parser": "xml"},
        "has no 'nobody'": {"agent": MINE + "nobody"},
    }.items():
        with pytest.raises(ConfigError, match=told):
            load_agent_loop("gateway", options=options, **given)


def test_the_agent_in_the_readme_works_as_written(
    chat: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, readme_block: Callable[[str], str]
) -> None:
    (tmp_path / "my_agent.py").write_text(readme_block("my_agent.py"), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    engine = Recorder(chat)
    (state,) = run(loop_of(chat, "my_agent:solve"), engine, questions("2 + 2?"))
    engine.check([state])
    assert "Are you sure?" in chat.decode(state.response_ids)


def test_agents_of_all_tasks_start_under_one_limit(chat: Any) -> None:
    limit, most = GatewaySection(limit={"at_once": 2}).limit, 0
    assert limit

    async def play() -> list[RolloutState]:
        nonlocal most
        with closing(Store("memory://")) as store:
            scene = Scene(store, store.client, new_nonce())
            running = 0

            async def agent(task: AgentTask) -> float:
                nonlocal most, running
                running += 1
                most = max(most, running)
                await ask(task, list(task.messages))
                running -= 1
                return 1.0

            loop = loop_of(chat, agent)
            loop._turns = cache(partial(limit.turns, scene.run, service="agents"))
            try:
                return await loop.generate_group(
                    questions(*"abcdef"), Recorder(chat), "math-0000000001"
                )
            finally:
                await loop.close()

    assert [state.reward for state in asyncio.run(play())] == [{"score": 1.0}] * 6
    assert most == 2
