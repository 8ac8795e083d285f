"""Make rollouts of several turns, with an environment or tools answering between them.

    ┌▶ model's turn (mask 1) ──stop──▶ environment ──messages──▶ their tokens (mask 0, logprob 0) ─┐
    └─────────────────────────────────────────────────────────────────────────────────────────────┘
                 │ tokens used up, last turn, or nothing to answer ──▶ judge ──▶ COMPLETED
                 └ abort ──▶ ABORTED, resumed from its tokens by any worker

A turn is a run of trained tokens, so tokens and mask are all the state: an interrupted rollout
continues where it was, and a tool without a result is called again. All tokens, the tools' too,
share `max_tokens`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from msgspec import structs

from buffer.errors import ConfigError
from buffer.wire.own_copy import own_copy
from buffer.wire.rollout import RolloutState, Status, has_ended
from producer_workers.agent_loops.chat_delta import ChatDelta
from producer_workers.agent_loops.environment import Answer, ContainedEnvironment, Environment, Turn
from producer_workers.agent_loops.single_turn import SingleTurnAgentLoop
from producer_workers.agent_loops.tokenizer import (
    BYTES_PER_TOKEN,
    Tokenizer,
    in_thread_of_texts,
    in_tokenizer_thread,
)
from producer_workers.agent_loops.tool_parsers import ToolParser, tool_parser
from producer_workers.agent_loops.toolbox import Toolbox
from producer_workers.datasets.row_values import byte_count
from producer_workers.engines.base import Engine, context_length
from producer_workers.judges.judge import Judge


class ToolEnvironment:
    """Runs the calls of a turn at the same time; a turn without calls is the last."""

    def __init__(self, toolbox: Toolbox, parser: ToolParser) -> None:
        self._toolbox = toolbox
        self._parser = parser

    async def close(self) -> None:
        await self._toolbox.close()

    async def answer(self, state: RolloutState, turn: Turn) -> Answer:
        if state.tool_choice == "none":
            return Answer()
        calls = [
            structs.replace(call, id=f"call_{turn.number}_{number}")
            for number, call in enumerate(self._parser.parse(turn.text, state.tools).calls)
        ]
        results = await self._toolbox.call_all(calls)
        messages = [
            {"role": "tool", "name": call.name, "tool_call_id": call.id, "content": result}
            for call, result in zip(calls, results, strict=True)
        ]
        return Answer(messages, calls)


class MultiTurnAgentLoop(SingleTurnAgentLoop):
    """Alternates between the model and an environment: an object, or "module:factory".

    `answer_timeout_s` limits one answer, `max_turns` the model's turns, `memory_mb` the address
    space of one of up to `processes` processes of a factory; for `keep_turns` see `ChatDelta`.
    `given`: the arguments of `SingleTurnAgentLoop`.
    """

    def __init__(
        self,
        *,
        environment: Environment | str,
        max_turns: int = 8,
        keep_turns: bool = False,
        answer_timeout_s: float = 120.0,
        processes: int = 4,
        memory_mb: int = 0,
        **given: Any,
    ) -> None:
        super().__init__(**given)
        if max_turns < 1:
            raise ConfigError(f"max_turns is {max_turns}", hint="it is at least 1")
        if not isinstance(environment, ToolEnvironment):
            environment = ContainedEnvironment(
                environment, answer_timeout_s, processes=processes, memory_mb=memory_mb
            )
        self._environment = environment
        self._max_turns = max_turns
        self._delta = ChatDelta(self._tokenizer, self._eos_ids, keep_turns=keep_turns)

    async def close(self) -> None:
        await self._environment.close()

    async def _run(self, state: RolloutState, engine: Engine, gid: str) -> None:
        if has_ended(state):  # only its judge is missing: the environment is not asked again
            await self._finish(state, state.finish_reason or "")
            return
        while True:
            reason = self._finished(state) or await self._generate(state, engine, gid)
            if reason == "abort":
                self._abort(state)
                return
            turns = state.turns()
            answer = await self._answer(state, turns) if reason == "stop" else Answer()
            if answer.turn_reward is not None:
                state.reward_turn(turns[-1], answer.turn_reward)
            if answer.reward:
                state.reward = {**(state.reward or {}), **answer.reward}
            if len(turns) >= self._max_turns:
                break
            state.tool_calls = [*state.tool_calls, *answer.calls]
            if not answer.messages:
                break
            if not await self._append(state, answer, engine):
                reason = "length"
                break
        # a limit ended it before the environment did: a failed group would favour short ones
        if self._judge is None and (reason == "length" or answer.messages):
            state.reward = {"score": 0.0, **(state.reward or {})}
        await self._finish(state, "length" if self._is_full(state) else reason)

    async def _finish(self, state: RolloutState, reason: str) -> None:
        """Complete a rollout; its earlier rewards are merged with the judge's."""
        earned = state.reward or {}
        await self._complete(state, reason)
        if state.status is Status.COMPLETED and earned:
            state.reward = {**earned, **(state.reward or {})}

    def _finished(self, state: RolloutState) -> str | None:
        """Return why the present turn is complete; None if it is not, or between turns."""
        mask = state.response_mask
        if mask is not None and len(mask) and not mask[-1]:
            return "length" if self._is_full(state) else None
        return super()._finished(state)

    async def _answer(self, state: RolloutState, turns: Sequence[slice]) -> Answer:
        # Special tokens stay: some templates mark a call with one.
        texts = await in_tokenizer_thread(
            lambda: [self._decode(state, turn, skip_special_tokens=False) for turn in turns]
        )
        turn = Turn(len(turns) - 1, texts[-1], texts[:-1])
        return own_copy(await self._environment.answer(state, turn))

    async def _append(self, state: RolloutState, answer: Answer, engine: Engine) -> bool:
        """Append an answer if it leaves room for one more token; return whether it did."""
        room = state.sample_params.max_tokens
        if (context := context_length(engine)) is not None and state.prompt_ids is not None:
            room = min(room, context - len(state.prompt_ids))
        room -= len(state.response_ids)
        most = BYTES_PER_TOKEN * room
        if (size := byte_count(answer.messages, most)) > most:
            return False
        was_ended = int(state.response_ids[-1]) in self._eos_ids
        tokens = await in_thread_of_texts(
            size, self._delta.tokens, answer.messages, end_turn=not was_ended
        )
        if len(tokens) >= room:
            return False
        state.read(tokens)
        state.finish_reason = None
        return True

    def _text(self, state: RolloutState) -> str:
        """Return the text of the last turn, which is judged; the rest is in the state."""
        return self._decode(state, state.turns()[-1], skip_special_tokens=True)

    def _decode(self, state: RolloutState, turn: slice, *, skip_special_tokens: bool) -> str:
        ids = state.response_ids[turn].tolist()
        while ids and ids[-1] in self._eos_ids:
            ids.pop()
        return str(self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))

    @staticmethod
    def _is_full(state: RolloutState) -> bool:
        return len(state.response_ids) >= state.sample_params.max_tokens


class ToolAgentLoop(MultiTurnAgentLoop):
    """Runs several turns with tools; `parser`: see tool_parsers.py, `toolbox`: see `Toolbox`."""

    def __init__(
        self,
        *,
        judge: Judge | None,
        tokenizer: Tokenizer,
        eos_ids: Collection[int],
        partial_rollout: bool = False,
        parser: str = "hermes",
        max_turns: int = 8,
        keep_turns: bool = False,
        **toolbox: Any,
    ) -> None:
        environment = ToolEnvironment(Toolbox(**toolbox), tool_parser(parser, tokenizer))
        super().__init__(
            judge=judge,
            tokenizer=tokenizer,
            eos_ids=eos_ids,
            partial_rollout=partial_rollout,
            environment=environment,
            max_turns=max_turns,
            keep_turns=keep_turns,
        )
