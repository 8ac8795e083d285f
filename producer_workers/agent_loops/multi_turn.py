"""Several turns of one rollout, with an environment or tools answering between them.

    ┌▶ model's turn (mask 1) ──stop──▶ environment ──messages──▶ their tokens (mask 0, logprob 0) ─┐
    └─────────────────────────────────────────────────────────────────────────────────────────────┘
                 │ budget used up, last turn, or nothing to answer ──▶ judge ──▶ COMPLETED
                 └ abort ──▶ ABORTED, resumed from its tokens by any worker

Everything follows from the tokens and their mask: a turn is a run of trained tokens. So a rollout
that was cut off inside a turn, or while a tool ran, goes on where it was; a tool whose result was
not there yet is called again. Token-exact: what is trained is what was sampled (`chat_delta.py`).
All tokens, the tools' too, share `max_tokens`.

What answers a model between its turns: a set of tools, a game, a user that is played by a program.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from buffer.errors import ConfigError
from buffer.model.dotted_path import load_object
from buffer.model.rollout import RolloutState, Status, ToolCall
from producer_workers.agent_loops.chat_delta import ChatDelta
from producer_workers.agent_loops.single_turn import SingleTurnAgentLoop
from producer_workers.agent_loops.tokenizer import Tokenizer, aside
from producer_workers.agent_loops.tool_parsers import PARSERS, ToolParser
from producer_workers.agent_loops.toolbox import Toolbox
from producer_workers.engines.base import Engine
from producer_workers.judges.judge import AnyJudge


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of the model: its number (0 is the first), its text, and all earlier ones'."""

    number: int
    text: str
    earlier: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """What comes after a turn: messages for the model, or nothing (the conversation is over).

    `calls` are noted in the rollout. `reward` ends up in its reward under that name, beside what
    the judge says.
    """

    messages: list[dict[str, Any]] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    reward: dict[str, float] = field(default_factory=dict)


class Environment(Protocol):
    """Keeps no state of a rollout: after a pause another worker may ask, so everything follows from
    the arguments.
    """

    async def answer(self, state: RolloutState, turn: Turn) -> Answer:
        """To one turn. What it raises fails the rollout."""
        ...


class ToolEnvironment:
    """Runs the calls of a turn at the same time; a turn without one is the last."""

    def __init__(self, toolbox: Toolbox, parse: ToolParser) -> None:
        self._toolbox = toolbox
        self._parse = parse

    async def answer(self, state: RolloutState, turn: Turn) -> Answer:
        found = enumerate(self._parse(turn.text))
        calls = [
            call.model_copy(update={"id": f"call_{turn.number}_{place}"}) for place, call in found
        ]
        results = await self._toolbox.call_all(calls)
        messages = [
            {"role": "tool", "name": call.name, "tool_call_id": call.id, "content": result}
            for call, result in zip(calls, results, strict=True)
        ]
        return Answer(messages, calls)


class MultiTurnAgentLoop(SingleTurnAgentLoop):
    """`environment`: an object, or "module:factory" of one. `max_turns`: turns of the model at
    most. `keep_turns`: see `ChatDelta`.
    """

    def __init__(
        self,
        *,
        judge: AnyJudge | None,
        tokenizer: Tokenizer,
        eos_ids: Collection[int],
        partial_rollout: bool = False,
        environment: Environment | str,
        max_turns: int = 8,
        keep_turns: bool = False,
    ) -> None:
        super().__init__(
            judge=judge, tokenizer=tokenizer, eos_ids=eos_ids, partial_rollout=partial_rollout
        )
        if max_turns < 1:
            raise ConfigError(f"max_turns is {max_turns}", hint="at least 1")
        self._environment: Environment = (
            load_object(environment, kind="environment")()
            if isinstance(environment, str)
            else environment
        )
        self._max_turns = max_turns
        self._delta = ChatDelta(tokenizer, eos_ids, keep_turns=keep_turns)

    async def _run(self, state: RolloutState, engine: Engine, gid: str) -> None:
        if not (self._partial_rollout and state.status in (Status.ABORTED, Status.INIT)):
            state.reset_response()
        while True:
            reason = self._finished(state) or await self._generate(state, engine, gid)
            if reason == "abort":
                self._abort(state)
                return
            turns = turns_of(state)
            answer = await self._answer(state, turns) if reason == "stop" else Answer()
            if answer.reward:
                state.reward = {**(state.reward or {}), **answer.reward}
            if len(turns) >= self._max_turns or not await self._go_on(state, answer):
                break
        earned = state.reward or {}
        await self._complete(state, "length" if self._is_full(state) else reason)
        if state.status is Status.COMPLETED and earned:
            state.reward = earned | (state.reward or {})

    def _finished(self, state: RolloutState) -> str | None:
        """Why the turn that is there needs no more tokens; None where it does. Between two turns
        there is none yet.
        """
        if (
            len(state.response_ids)
            and state.response_mask is not None
            and not state.response_mask[-1]
        ):
            return "length" if self._is_full(state) else None
        return super()._finished(state)

    async def _answer(self, state: RolloutState, turns: Sequence[slice]) -> Answer:
        # some templates mark a call with a special token
        texts = await aside(
            lambda: [self._decode(state, turn, skip_special_tokens=False) for turn in turns]
        )
        return await self._environment.answer(state, Turn(len(turns) - 1, texts[-1], texts[:-1]))

    async def _go_on(self, state: RolloutState, answer: Answer) -> bool:
        """Put an answer's tokens behind the turn; False where there is none, or no room for it and
        one token more.
        """
        state.tool_calls = [*state.tool_calls, *answer.calls]
        if not answer.messages:
            return False
        was_ended = int(state.response_ids[-1]) in self._eos_ids
        tokens = await aside(self._delta.tokens, answer.messages, end_turn=not was_ended)
        if len(state.response_ids) + len(tokens) >= state.sample_params.max_tokens:
            return False
        state.read(tokens)
        state.finish_reason = None
        return True

    def _text(self, state: RolloutState) -> str:
        """The text of the last turn is what is judged as the response; the rest is in the state."""
        return self._decode(state, turns_of(state)[-1], skip_special_tokens=True)

    def _decode(self, state: RolloutState, turn: slice, *, skip_special_tokens: bool) -> str:
        ids = state.response_ids[turn].tolist()
        while ids and ids[-1] in self._eos_ids:
            ids.pop()
        return str(self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))

    @staticmethod
    def _is_full(state: RolloutState) -> bool:
        return len(state.response_ids) >= state.sample_params.max_tokens


class ToolAgentLoop(MultiTurnAgentLoop):
    """Several turns with tools: `tools` are functions, or "module:function" each; `mcp` are servers
    of more (see mcp_server.py); `parser`: see tool_parsers.py.
    """

    def __init__(
        self,
        *,
        tools: Sequence[Any] = (),
        mcp: Sequence[Any] = (),
        parser: str = "hermes",
        call_timeout_s: float = 30.0,
        max_turns: int = 8,
        **common: Any,
    ) -> None:
        if parser not in PARSERS:
            raise ConfigError(
                f"there is no tool parser {parser!r}", hint=f"known: {', '.join(PARSERS)}"
            )
        environment = ToolEnvironment(
            Toolbox(tools, mcp=mcp, call_timeout_s=call_timeout_s), PARSERS[parser]
        )
        super().__init__(environment=environment, max_turns=max_turns, **common)


def turns_of(state: RolloutState) -> list[slice]:
    """The turns of the model in the response: its runs of trained tokens."""
    if state.response_mask is None:
        return [slice(0, len(state.response_ids))]
    edges = np.flatnonzero(np.diff(state.response_mask, prepend=0, append=0)).tolist()
    return [slice(edges[n], edges[n + 1]) for n in range(0, len(edges), 2)]
