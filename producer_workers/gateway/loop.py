"""Make rollouts with agent programs that speak to a local endpoint as to OpenAI or Anthropic.

    group ──▶ gateway ──▶ per rollout: session, key ──▶ agent ──▶ its segments ──judge──▶ rollouts
                                                           └ ended by a pause, started again later

A session gives one rollout per segment, with the same `index`, `session_id` and reward, so the
groups of a task vary in size. The prompt of a group is what all its segments have in common; other
text that a segment read before its first turn is in its response, with mask 0.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from buffer.errors import ConfigError, JudgeError, JudgeInterrupted
from buffer.wire.own_copy import own_copy
from buffer.wire.rollout import RolloutState, Status, has_ended
from producer_workers.agent_loops.chat_delta import ChatDelta
from producer_workers.agent_loops.mcp_server import keep_loopback_direct
from producer_workers.agent_loops.single_turn import run_all
from producer_workers.agent_loops.tokenizer import Tokenizer
from producer_workers.agent_loops.tool_parsers import tool_parser
from producer_workers.engines.base import Engine
from producer_workers.gateway.agents import (
    Agent,
    AgentError,
    AgentTask,
    FunctionAgent,
    ProgramAgent,
)
from producer_workers.gateway.segment import (
    Segment,
    SessionRecord,
    common_prompt,
    without_record,
)
from producer_workers.gateway.server import Gateway
from producer_workers.gateway.session import Session
from producer_workers.judges.judge import Judge
from producer_workers.user_code.failure import log_failure

# The rollouts of a session, one per segment, all tokens in the response; without tokens if it was
# interrupted or failed.
Rollouts = list[RolloutState]


class GatewayAgentLoop:
    """Runs one agent for each rollout of a group, for up to `time_limit_s` seconds.

    `agent` is a function or "module:function"; or `command` is a program. `parser`: see
    tool_parsers.py, "" for none. An interrupted session begins again, unless its agent is
    `resumable` and the task has partial rollout: then any worker continues it after its finished
    turns (`SessionRecord`). Sessions of its group that had ended keep their rollouts; those without
    a reward are only judged.
    """

    makes_prompts = True  # what its sessions have in common
    uses_gateway = True

    def __init__(
        self,
        *,
        judge: Judge | None,
        tokenizer: Tokenizer,
        eos_ids: Collection[int],
        partial_rollout: bool = False,
        agent: Any = None,
        command: Sequence[str] = (),
        parser: str = "hermes",
        time_limit_s: float = 600.0,
        resumable: bool = False,
        gateway: Gateway | None = None,
    ) -> None:
        if (agent is None) == (not command):
            raise ConfigError(
                "the gateway needs an agent or a command, not both",
                hint='set agent = "module:function", or command = [...]',
            )
        keep_loopback_direct()
        self._agent: Agent = agent
        if command:
            self._agent = ProgramAgent(command, time_limit_s)
        elif not isinstance(agent, Agent):
            self._agent = FunctionAgent(agent, time_limit_s)
        self._is_resumable = partial_rollout and (resumable or self._agent.resumable)
        self._judge = judge
        self._tokenizer = tokenizer
        self._eos_ids = frozenset(eos_ids)
        self._delta = ChatDelta(tokenizer, eos_ids)
        self._parser = tool_parser(parser, tokenizer) if parser else None
        self._gateway = gateway or Gateway()

    async def open(self) -> None:
        await self._gateway.start()

    async def close(self) -> None:
        self._agent.close()
        await self._gateway.close()  # all loops of a worker close together

    async def generate_group(
        self, states: list[RolloutState], engine: Engine, gid: str
    ) -> list[RolloutState]:
        """Like `AgentLoop`; it may return more rollouts than it got."""
        if any(state.multimodal for state in states):
            raise ConfigError(
                f"{gid} has images, which the gateway cannot pass to agents",
                hint="use another agent_loop for its task",
            )
        by_index: dict[int, Rollouts] = {}
        for state in states:
            by_index.setdefault(state.index, []).append(state)
        unjudged = {index for index, session in by_index.items() if _is_unjudged(session[0])}
        record = SessionRecord(states[0].extra)

        async def run(index: int, rollouts: Rollouts) -> None:
            by_index[index] = await self._session(rollouts, engine, gid, record)

        await self._gateway.start()
        await run_all(
            run(index, rollouts)
            for index, rollouts in by_index.items()
            if rollouts[0].status is not Status.COMPLETED and index not in unjudged
        )
        sessions = [by_index[index] for index in sorted(by_index)]
        if self._judge and self._judge.sees_group:
            await self._judge_together(sessions)
        else:
            await asyncio.gather(*(self._reward([by_index[index]]) for index in unjudged))
        group = [rollout for session in sessions for rollout in session]
        _share_prompt(group)
        record.write(group)
        return group

    async def _session(
        self,
        rollouts: Sequence[RolloutState],
        engine: Engine,
        gid: str,
        record: SessionRecord,
    ) -> Rollouts:
        finished = record.resume(rollouts)
        state = rollouts[0]
        state.reset_response()
        name = f"{gid}/{state.index}"
        session = Session(
            name,
            engine,
            self._tokenizer,
            self._delta,
            self._eos_ids,
            state.sample_params,
            self._parser,
            finished,
        )
        key = self._gateway.admit(session)
        task = AgentTask(
            self._gateway.url,
            key,
            own_copy(state.messages),
            state.data_source,
            own_copy(without_record(state.extra)),
            own_copy(state.ground_truth),
            session_id=name,
            finished=[own_copy(list(segment.messages)) for segment in finished],
        )
        state.session_id = name
        try:
            reward = await self._run(task, session)
        except AgentError as error:
            # The end of a session may fail its agent through no fault of its own.
            reward = None if self._judge else error.earned
            is_cut = (session.is_full or session.truncation) and (self._judge or error.earned)
            if not session.interrupted.is_set() and not is_cut:
                return [_failed(state, log_failure(error))]
        finally:
            self._gateway.dismiss(key)
            record.count(session.new_contexts)
        if session.failure:  # the agent cannot raise it: it got it as an HTTP status
            raise session.failure
        if session.interrupted.is_set():
            return self._interrupted(state, session.segments, record)
        if not session.segments:
            why = session.truncation or "the agent ended without an answer of the model"
            return [_failed(state, why)]
        if session.truncation:
            session.segments[-1] = replace(session.segments[-1], finish_reason="length")
        return await self._finish(state, session.segments, reward)

    def _interrupted(
        self, state: RolloutState, segments: Sequence[Segment], record: SessionRecord
    ) -> Rollouts:
        state.status = Status.ABORTED
        state.finish_reason = "abort"
        if not segments:
            return [state]
        if not self._is_resumable:
            record.restart()
            return [state]
        record.keep(state.index, segments)
        return [replace(each, finish_reason="abort").filled(state) for each in segments]

    async def _run(self, task: AgentTask, session: Session) -> dict[str, float] | None:
        running = asyncio.ensure_future(self._agent.run(task))
        interrupted = asyncio.ensure_future(session.interrupted.wait())
        try:
            done, _ = await asyncio.wait(
                {running, interrupted}, return_when=asyncio.FIRST_COMPLETED
            )
            return running.result() if running in done else None
        finally:
            for waiting in (running, interrupted):
                waiting.cancel()
            await asyncio.gather(running, interrupted, return_exceptions=True)

    async def _finish(
        self, state: RolloutState, segments: Sequence[Segment], earned: dict[str, float] | None
    ) -> Rollouts:
        """Turn the segments into rollouts, with their reward unless all sessions must end first."""
        # On the given state, too: the worker reads there that the engine has a free slot again.
        state.finish_reason = segments[-1].finish_reason
        rollouts = [segment.filled(state, reward=earned) for segment in segments]
        if not (self._judge and self._judge.sees_group):
            await self._reward([rollouts])
        return rollouts

    async def _reward(self, sessions: Sequence[Rollouts]) -> None:
        """Add the judge's reward of each session's last turn to the agent's own reward."""
        lasts = [session[-1] for session in sessions]
        try:
            rewards = await self._judge.judge_group(lasts) if self._judge else [{}] * len(lasts)
        except JudgeInterrupted:
            _await_judge(sessions)
            return
        except JudgeError as error:
            reason = log_failure(error)
            for session in sessions:
                for rollout in session:
                    rollout.status = Status.FAILED
                    rollout.error = reason
            return
        for session, reward in zip(sessions, rewards, strict=True):
            for rollout in session:
                rollout.status = Status.COMPLETED
                rollout.reward = {**(rollout.reward or {}), **reward} or None

    async def _judge_together(self, sessions: Sequence[Rollouts]) -> None:
        """Judge all sessions; if one was interrupted or failed, those that ended wait for it."""
        ended = [
            [state for state in session if len(state.response_ids) and has_ended(state)]
            for session in sessions
        ]
        if all(ended):
            await self._reward(ended)
        else:
            _await_judge(ended)


def _await_judge(sessions: Sequence[Rollouts]) -> None:
    """Leave rollouts without a reward to the judge of a later claim of their group."""
    for rollout in chain.from_iterable(sessions):
        if _is_unjudged(rollout):
            rollout.status = Status.ABORTED


def _is_unjudged(state: RolloutState) -> bool:
    return has_ended(state) and state.status in (Status.INIT, Status.ABORTED)


def _failed(state: RolloutState, reason: str) -> RolloutState:
    state.reset_response()
    state.status = Status.FAILED
    state.error = reason
    return state


def _share_prompt(group: Rollouts) -> None:
    """Make what all segments of a group begin with its prompt."""
    segments = [(state, Segment.of_state(state)) for state in group if len(state.response_ids)]
    if not segments:
        return
    prompt = common_prompt([segment for _, segment in segments])
    for state in group:
        state.prompt_ids = segments[0][1].ids[:prompt]
    for state, segment in segments:
        segment.fill(state, prompt)
