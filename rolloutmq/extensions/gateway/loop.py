"""Make rollouts with agent programs that speak to a local endpoint as to OpenAI or Anthropic.

    group ──▶ gateway ──▶ per rollout: session, key ──▶ agent ──▶ its segments ──judge──▶ rollouts
                                                           └ ended by a pause, started again later

A session gives one rollout per segment, with the same `index`, `session_id`, `role` and reward, so
the groups of a task vary in size. An agent has a session of its own and one for each role that it
gives to the model; if one fails, all begin again, because one program leads them. The prompt of a
group is what all its segments have in common; other text that a segment read before its first turn
is in its response, with mask 0.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from functools import cache, partial
from itertools import chain, groupby
from typing import Any, ClassVar, Literal

from buffer.errors import ConfigError, JudgeError, JudgeInterrupted, WireError
from buffer.ids import split_group_id
from buffer.job import Job
from buffer.run.run import Run
from buffer.wire.group import RolloutGroup
from buffer.wire.own_copy import own_copy
from buffer.wire.rollout import RolloutState, Status, has_ended
from buffer.wire.sampling import SampleParams
from producer_workers.agent_loops.agent_loop import AgentLoop, Generate
from producer_workers.agent_loops.chat_delta import ChatDelta
from producer_workers.agent_loops.mcp_server import keep_loopback_direct
from producer_workers.agent_loops.single_turn import run_all
from producer_workers.agent_loops.tokenizer import Tokenizer
from producer_workers.agent_loops.tool_parsers import tool_parser
from producer_workers.call_turns import Turns
from producer_workers.config.producing import ProducingConfig
from producer_workers.engines.base import Engine
from producer_workers.judges.judge import Judge
from producer_workers.user_code.failure import log_failure
from producer_workers.work_time import AGENT
from rolloutmq.extensions.gateway.agent_rollouts import (
    Rollouts,
    ended_rollouts,
    interrupted_rollouts,
)
from rolloutmq.extensions.gateway.agent_sessions import AgentSessions
from rolloutmq.extensions.gateway.agents import (
    EVERY_ROLE,
    Agent,
    AgentError,
    AgentTask,
    Begin,
    Earned,
    FunctionAgent,
    ProgramAgent,
)
from rolloutmq.extensions.gateway.kept_turns import Keeper, TurnWriter, with_turns
from rolloutmq.extensions.gateway.section import section_of
from rolloutmq.extensions.gateway.segment import Segment, share_prompt
from rolloutmq.extensions.gateway.server import Gateway
from rolloutmq.extensions.gateway.session import Session
from rolloutmq.extensions.gateway.session_record import SessionRecord, without_record
from rolloutmq.extensions.gateway.turn_keeper import TurnKeeper


class GatewayAgentLoop(AgentLoop):
    """Runs one agent for each rollout of a group, for up to `time_limit_s` seconds.

    `agent` is a function or "module:function", with `agent_options` as its keyword arguments; or
    `command` is a program. `parser`: see tool_parsers.py, "" for none. An interrupted session
    begins again, unless its agent is `resumable` and the task has partial rollout: then any worker
    continues it after its finished turns (`SessionRecord`). Sessions of its group that had ended
    keep their rollouts; those without a reward are only judged. `train`: the task's conversation
    (`task_conversation.of_task`), or all.
    """

    makes_prompts = True  # what its sessions have in common
    needs: ClassVar[Mapping[str, str]] = {"aiohttp": "aiohttp"}
    answers_again = False  # a program asks again for the last turn before its session moved

    def __init__(
        self,
        *,
        judge: Judge | None,
        tokenizer: Tokenizer,
        eos_ids: Collection[int],
        partial_rollout: bool = False,
        agent: Any = None,
        agent_options: Mapping[str, Any] | None = None,
        command: Sequence[str] = (),
        parser: str = "hermes",
        time_limit_s: float = 600.0,
        resumable: bool = False,
        train: Literal["task", "all"] = "task",
        gateway: Gateway | None = None,
    ) -> None:
        if train not in ("task", "all"):
            raise ConfigError(
                f"agent_loop_options.train = {train!r}",
                hint='"task" trains the conversation of the task\'s prompt, "all" the others, too',
            )
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
            self._agent = FunctionAgent(agent, time_limit_s, agent_options)
        # Another worker can continue its sessions.
        self.keeps_turns = partial_rollout and (resumable or self._agent.resumable)
        self._judge = judge
        self._tokenizer = tokenizer
        self._eos_ids = frozenset(eos_ids)
        self._delta = ChatDelta(tokenizer, eos_ids)
        self._parser = tool_parser(parser, tokenizer) if parser else None
        self._gateway = gateway or Gateway()
        self._trains_all = train == "all"
        self._turns: Callable[[str], Turns] | None = None  # by task, under [gateway] limit

    @classmethod
    def of_worker(
        cls, config: ProducingConfig, run: Run, tasks: Collection[str], **given: Any
    ) -> AgentLoop:
        section = section_of(config)
        loop = cls(gateway=Gateway.shared(section), **given)
        if section.limit:
            loop._turns = cache(partial(section.limit.turns, run, service="agents"))
        return loop

    def resume(self, group: RolloutGroup) -> RolloutGroup:
        if not group.turns:
            return group
        states = with_turns(group.states, group.turns, group.gid, trains_all=self._trains_all)
        return group.continued(states)

    def for_claim(self, run: Run, job: Job, group: RolloutGroup) -> Generate:
        if not self.keeps_turns:
            return self.generate_group
        return partial(self.generate_group, keeper=TurnKeeper(run, job, group))

    async def open(self) -> None:
        await self._gateway.start()

    async def close(self) -> None:
        self._agent.close()
        await self._gateway.close()  # all loops of a worker close together

    async def generate_group(
        self, states: list[RolloutState], engine: Engine, gid: str, keeper: Keeper | None = None
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
        made = {index for index, rollouts in by_index.items() if all(map(_is_made, rollouts))}
        ended = [each for each in _sessions(states) if each[0].index in made]
        unjudged = [each for each in ended if _is_unjudged(each[0])]
        record = SessionRecord(states[0].extra)

        async def run(index: int, rollouts: Rollouts) -> None:
            by_index[index] = await self._agent_run(rollouts, engine, gid, record, keeper)

        await self._gateway.start()
        await run_all(
            run(index, rollouts) for index, rollouts in by_index.items() if index not in made
        )
        group = [rollout for index in sorted(by_index) for rollout in by_index[index]]
        if self._judge and self._judge.sees_group:
            await self._judge_together(_sessions(group))
        else:
            await asyncio.gather(*(self._reward([each]) for each in unjudged))
        share_prompt(group)
        record.write(group)
        return group

    async def _agent_run(
        self,
        rollouts: Sequence[RolloutState],
        engine: Engine,
        gid: str,
        record: SessionRecord,
        keeper: Keeper | None,
    ) -> Rollouts:
        state = rollouts[0]
        name = f"{gid}/{state.index}"
        finished = record.resume(rollouts, name)
        state.reset_response()
        writer = TurnWriter(keeper, state.index, finished) if keeper else None
        make = partial(self._session, engine, state.sample_params, name, writer)
        sessions = AgentSessions(make, finished)
        state.session_id = name
        key = ""

        def begin() -> AgentTask:
            nonlocal key
            known = finished
            if key:  # its process ended with its requests
                self._gateway.dismiss(key)
                record.count(sessions.new_contexts)
                known = sessions.segments() if self.keeps_turns else {}
                sessions.restart(known)
            key = self._gateway.admit(sessions, self._key(state, gid))
            conversations = {
                role: [own_copy(list(segment.messages)) for segment in segments]
                for role, segments in known.items()
            }
            return AgentTask(
                self._gateway.url,
                key,
                own_copy(state.messages),
                state.data_source,
                own_copy(without_record(state.extra)),
                own_copy(state.ground_truth),
                session_id=name,
                finished=conversations.pop("", []),
                finished_roles=conversations,
            )

        try:
            earned = await self._run(begin, sessions, name)
        except AgentError as error:
            # The end of a session may fail its agent through no fault of its own.
            earned = {EVERY_ROLE: dict(error.earned)} if error.earned and not self._judge else None
            is_cut = sessions.is_full or sessions.cut()
            if not sessions.interrupted.is_set() and not (is_cut and (self._judge or earned)):
                return [_failed(state, log_failure(error), writer)]
        finally:
            if key:
                self._gateway.dismiss(key)
            record.count(sessions.new_contexts)
        if sessions.failure:  # the agent cannot raise it: it got it as an HTTP status
            raise sessions.failure
        if sessions.interrupted.is_set():
            segments = sessions.segments()
            if segments and not self.keeps_turns:
                record.restart()
                segments = {}
            return interrupted_rollouts(state, segments, record)
        return await self._finish(state, sessions, earned, writer, record)

    def _session(
        self,
        engine: Engine,
        params: SampleParams,
        agent: str,
        writer: TurnWriter | None,
        name: str,
        finished: list[Segment],
    ) -> Session:
        own = params.attempt(name)  # no two sessions have the same seeds
        parts = (self._tokenizer, self._delta, self._eos_ids, own, self._parser, finished)
        session = Session(f"{agent}/{name}" if name else agent, engine, *parts, writer, name)
        session.unsent = [*finished] if self.answers_again else []
        return session

    async def _run(self, begin: Begin, sessions: AgentSessions, name: str) -> Earned | None:
        async def play() -> Earned | None:
            task = split_group_id(name.partition("/")[0])[0]
            async with self._turns(task).turn() if self._turns else nullcontext():
                AGENT.set(name)
                return await self._agent.run(begin)

        running = asyncio.ensure_future(play())
        interrupted = asyncio.ensure_future(sessions.interrupted.wait())
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
        self,
        state: RolloutState,
        sessions: AgentSessions,
        earned: Earned | None,
        writer: TurnWriter | None,
        record: SessionRecord,
    ) -> Rollouts:
        """Turn the segments into rollouts, with their reward unless all sessions must end first."""
        segments, cut = sessions.segments(), sessions.cut()
        if not segments:
            why = "the agent ended without an answer of the model"
            return [_failed(state, next(iter(cut.values()), why), writer)]
        try:
            made = ended_rollouts(
                state, segments, cut, earned or {}, record, trains_all=self._trains_all
            )
        except WireError as error:
            return [_failed(state, f"the agent returned {error}", writer)]
        await self._ended(state, writer, [*cut], earned or {})
        # On the given state, too: the worker reads there that the engine has a free slot again.
        state.finish_reason = made[0][-1].finish_reason
        if not (self._judge and self._judge.sees_group):
            await asyncio.gather(*(self._reward([rollouts]) for rollouts in made))
        return [*chain.from_iterable(made)]

    def _key(self, state: RolloutState, gid: str) -> str:
        """Return the key of an agent; "": a new one."""
        return ""

    async def _ended(
        self, state: RolloutState, writer: TurnWriter | None, cut: list[str], earned: Earned
    ) -> None:
        """Keep the rewards that an agent gives, before the judge adds to them."""
        if writer:
            writer.ended(cut, earned)

    async def _reward(self, sessions: Sequence[Rollouts]) -> None:
        """Add the judge's reward of each session's last turn to the agent's own reward.

        The last turn is that of the task's conversation (`ended_rollouts`).
        """
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


def _sessions(rollouts: Sequence[RolloutState]) -> list[Rollouts]:
    """Return the rollouts of each session."""
    return [list(each) for _, each in groupby(rollouts, lambda s: (s.index, s.session_id))]


def _await_judge(sessions: Sequence[Rollouts]) -> None:
    """Leave rollouts without a reward to the judge of a later claim of their group."""
    for rollout in chain.from_iterable(sessions):
        if _is_unjudged(rollout):
            rollout.status = Status.ABORTED


def _is_made(state: RolloutState) -> bool:
    return state.status is Status.COMPLETED or _is_unjudged(state)


def _is_unjudged(state: RolloutState) -> bool:
    return has_ended(state) and state.status in (Status.INIT, Status.ABORTED)


def _failed(state: RolloutState, reason: str, writer: TurnWriter | None) -> RolloutState:
    if writer:
        writer.failed()
    state.reset_response()
    state.status = Status.FAILED
    state.error = reason
    return state
