"""Make one answer for each rollout: generate, decode, judge.

    INIT or ABORTED ──generate──▶ stop, length ──judge──▶ COMPLETED
          ▲                           │   └── judge error ──▶ FAILED
          └──── ABORTED ◀── abort ────┘       (no token at all: FAILED too)

A rollout becomes COMPLETED only with its reward, and is then never generated or judged again. One
that was interrupted during judging is judged when its group is resumed.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Collection, Coroutine, Iterable, Sequence
from typing import Any

import numpy as np

from buffer.errors import (
    ConfigError,
    JudgeError,
    JudgeInterrupted,
    RolloutMQError,
    UserCodeError,
    WireError,
)
from buffer.wire.rollout import RolloutState, Status, has_ended
from producer_workers.agent_loops.agent_loop import AgentLoop
from producer_workers.agent_loops.tokenizer import Tokenizer, in_tokenizer_thread
from producer_workers.engines.base import Engine, GenerationError
from producer_workers.judges.judge import Judge
from producer_workers.user_code.failure import log_failure


class SingleTurnAgentLoop(AgentLoop):
    """Runs the rollouts of a group at the same time, one request each; changes the given states.

    With `partial_rollout`, an aborted rollout keeps its tokens and continues after them; otherwise
    it starts again from its prompt. Without a `judge`, the reward stays empty.
    """

    def __init__(
        self,
        *,
        judge: Judge | None,
        tokenizer: Tokenizer,
        eos_ids: Collection[int],
        partial_rollout: bool = False,
    ) -> None:
        self._judge = judge
        self._tokenizer = tokenizer
        self._eos_ids = frozenset(eos_ids)
        self._partial_rollout = partial_rollout
        self._attempts = itertools.count()

    async def generate_group(
        self, states: list[RolloutState], engine: Engine, gid: str
    ) -> list[RolloutState]:
        """Like `AgentLoop`; a refused request or a failing environment fails its rollout alone.

        Any other error of one rollout cancels the others of the group, then is raised.
        """
        choice = states[0].tool_choice
        if choice not in (None, "auto", "none"):
            raise ConfigError(
                f"{gid} has tool_choice {choice!r}, which this agent loop cannot enforce",
                hint="leave it out, or use an agent, which may ask for it",
            )
        await run_all(
            self._attempt(state, engine, gid)
            for state in states
            if state.status is not Status.COMPLETED
        )
        ended = [state for state in states if state.status is Status.INIT]
        if ended and self._judge:
            await self._write_responses(ended)
            await self._judge_together(self._judge, states, ended)
        return states

    async def _judge_together(
        self, judge: Judge, states: list[RolloutState], ended: list[RolloutState]
    ) -> None:
        """Judge those that have `ended`; a judge of groups waits for one that was interrupted."""
        is_open = any(state.status in (Status.ABORTED, Status.FAILED) for state in states)
        judged: Sequence[dict[str, float] | RolloutMQError]
        try:
            if judge.sees_group and is_open:
                raise JudgeInterrupted("the group is not complete")
            if judge.sees_group:
                rewards = await judge.judge_group(states)
                pairs = zip(states, rewards, strict=True)
                judged = [reward for state, reward in pairs if state.status is Status.INIT]
            else:
                judged = await judge.judge_each(ended)
        except JudgeInterrupted:
            for state in ended:
                self._abort(state)
            return
        except JudgeError as error:
            judged = [error] * len(ended)
        for state, reward in zip(ended, judged, strict=True):
            if isinstance(reward, RolloutMQError):
                _fail(state, log_failure(reward))
            else:
                state.status = Status.COMPLETED
                state.reward = {**(state.reward or {}), **reward}

    async def _attempt(self, state: RolloutState, engine: Engine, gid: str) -> None:
        keeps_tokens = self._partial_rollout or has_ended(state)
        if not keeps_tokens or state.status not in (Status.ABORTED, Status.INIT):
            state.reset_response()
        try:
            await self._run(state, engine, gid)
        # an environment's call fails its rollout alone, and so does a refused request
        except Exception as error:
            own = GenerationError | UserCodeError
            if isinstance(error, RolloutMQError) and not isinstance(error, own):
                raise
            _fail(state, log_failure(error))

    async def _run(self, state: RolloutState, engine: Engine, gid: str) -> None:
        reason = self._finished(state) or await self._generate(state, engine, gid)
        if reason == "abort":
            self._abort(state)
        else:
            await self._complete(state, reason)

    def _finished(self, state: RolloutState) -> str | None:
        """Return why a resumed rollout needs no request any more; None if it does."""
        if has_ended(state):
            return state.finish_reason
        done = len(state.response_ids)
        params = state.sample_params
        if done and int(state.response_ids[-1]) in self._eos_ids.union(params.stop_token_ids):
            return "stop"
        return "length" if done >= params.max_tokens else None

    async def _generate(self, state: RolloutState, engine: Engine, gid: str) -> str:
        if state.prompt_ids is None:
            raise WireError(f"rollout {state.index} of {gid} has no prompt_ids")
        # The count keeps ids unique: the engine may still know the request that was aborted.
        request_id = f"{gid}/{state.index}/{next(self._attempts)}"
        tokens = np.concatenate([state.prompt_ids, state.response_ids])
        params = state.sample_params.after(len(state.response_ids))
        made = await engine.generate(request_id, tokens, params)
        state.append(made.token_ids, made.logprobs, made.spans, **made.columns)
        return made.finish_reason

    def _abort(self, state: RolloutState) -> None:
        """Abort a rollout; one that has ended keeps its reason, and waits for the others."""
        if not has_ended(state):
            # A structured response cannot be continued in its middle.
            if not self._partial_rollout or state.sample_params.structured:
                state.reset_response()
            state.finish_reason = "abort"
        state.status = Status.ABORTED

    async def _complete(self, state: RolloutState, reason: str) -> None:
        state.finish_reason = reason
        if not len(state.response_ids):
            why = f"the engine finished ({reason}) without a token"
            if reason == "length" and state.prompt_ids is not None:
                why = f"the prompt of {len(state.prompt_ids)} tokens fills the engine's context"
            _fail(state, why)
            return
        if self._judge and (self._judge.sees_group or self._judge.is_quick):
            state.status = Status.INIT  # until all of the group have ended
            return
        await self._write_responses([state])
        try:
            state.reward = await self._judge.judge(state) if self._judge else state.reward
        except JudgeInterrupted:
            self._abort(state)
        except JudgeError as error:
            _fail(state, log_failure(error))
        else:
            state.status = Status.COMPLETED

    async def _write_responses(self, states: Sequence[RolloutState]) -> None:
        texts = await in_tokenizer_thread(lambda: list(map(self._text, states)))
        for state, text in zip(states, texts, strict=True):
            state.response = text

    def _text(self, state: RolloutState) -> str:
        return str(self._tokenizer.decode(state.response_ids.tolist(), skip_special_tokens=True))


def _fail(state: RolloutState, reason: str) -> None:
    state.status = Status.FAILED
    state.error = reason


async def run_all(rollouts: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run all; on the first error cancel the rest, wait for their end, and raise it."""
    tasks = list(map(asyncio.ensure_future, rollouts))
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
