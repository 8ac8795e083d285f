"""A session: all that one run of an agent asks the model, kept as the tokens that were really read and sampled.

    request ──▶ its messages continue a segment ──▶ that segment's ids, and the tokens of what is new behind them
            └─▶ they continue none (another prompt, a history that was cut or edited) ──▶ a new segment

Where two requests continue the same segment (a second attempt, two tools at once), its tokens are trained with the
first answer, and are context alone for the others.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import orjson

from buffer.errors import ConfigError, RolloutMQError
from buffer.rollout import SampleParams, ToolCall
from producer_workers.agent_loops.chat_delta import ChatDelta
from producer_workers.agent_loops.gateway.segment import Messages, Segment
from producer_workers.agent_loops.tool_parsers import PARSERS
from producer_workers.engines.base import Engine, Generation
from producer_workers.tokenizer import Tokenizer, encode_chat

log = logging.getLogger("rolloutmq.worker")

CALL_MARKS = {"hermes": "<tool_call>", "llama": "{", "mistral": "[TOOL_CALLS]"}
"""Where the calls of a turn begin; what stands before is its text."""


class SessionClosed(RolloutMQError):
    """Nothing more is generated for this session: its budget is used up, or it was interrupted."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One answer of the model: its message in OpenAI's form, and what it took."""

    message: dict[str, Any]
    made: Generation
    prompt_tokens: int


class Session:
    """Of one rollout. `params`: the task's; `max_tokens` of it is for all that is sampled in the session."""

    def __init__(
        self,
        name: str,
        engine: Engine,
        tokenizer: Tokenizer,
        delta: ChatDelta,
        eos_ids: Collection[int],
        params: SampleParams,
        parser: str,
    ) -> None:
        self.name, self._engine, self._tokenizer, self._delta = name, engine, tokenizer, delta
        self._eos_ids, self._params, self._parser = frozenset(eos_ids), params, parser
        self._requests, self._sampled = itertools.count(), 0
        self._seen: list[Segment] = []
        self.segments: list[Segment] = []
        self.interrupted = asyncio.Event()

    @property
    def is_full(self) -> bool:
        return self._sampled >= self._params.max_tokens

    async def complete(self, messages: Messages, tools: Any, max_tokens: int | None, stops: Sequence[str]) -> Turn:
        """One turn of the model. Raises SessionClosed, ConfigError (the chat template refuses), GenerationError."""
        if self.interrupted.is_set() or self.is_full:
            raise SessionClosed("interrupted" if self.interrupted.is_set() else "the session's max_tokens are used up")
        number = next(self._requests)
        parent, context = self._context(messages, tools)
        made = await self._engine.generate(
            f"{self.name}/{number}", context.ids, self._sampling(number, max_tokens, stops)
        )
        self._sampled += len(made.token_ids)
        if made.finish_reason == "abort":
            self.interrupted.set()
            raise SessionClosed("interrupted")
        message, text, calls = self._message(number, made)
        is_first = parent is None or parent in self.segments
        grown = (context if is_first else context.untrained()).say(made, message, text, calls)
        self._seen.append(grown)
        self.segments = [segment for segment in self.segments if segment is not parent] + [grown]
        return Turn(message, made, len(context.ids))

    def _parent(self, messages: Messages, tools: Any) -> Segment | None:
        """The longest of all contexts there ever were that these messages continue."""
        fitting = [segment for segment in self._seen if segment.is_continued_by(messages, tools)]
        return max(fitting, key=lambda segment: len(segment.messages), default=None)

    def _context(self, messages: Messages, tools: Any) -> tuple[Segment | None, Segment]:
        """(the segment that goes on, None for a new one; what the model is given)"""
        parent = self._parent(messages, tools)
        if parent is not None:
            was_ended = len(parent.ids) > 0 and int(parent.ids[-1]) in self._eos_ids
            new = [_for_template(message) for message in messages[len(parent.messages) :]]
            try:
                return parent, parent.read(self._delta.tokens(new, end_turn=not was_ended), messages)
            except ConfigError:
                # the template writes earlier turns anew (drops what was thought, say): so does what the model reads
                log.debug("a chat template that rewrites earlier turns: a new segment", extra={"session": self.name})
        try:
            prompt = encode_chat(self._tokenizer, [_for_template(message) for message in messages], tools)
        except Exception as error:  # templates are programs of the model's authors: they raise what they like
            raise ConfigError(f"the chat template does not take these messages: {error}") from error
        return None, Segment.begin(messages, tools, prompt)

    def _sampling(self, number: int, max_tokens: int | None, stops: Sequence[str]) -> SampleParams:
        """The task's, for the trainer counts on it; only length and stop strings may be the agent's."""
        params, left = self._params, self._params.max_tokens - self._sampled
        return params.model_copy(
            update={
                "max_tokens": min(left, max_tokens or left),
                "min_tokens": 0,
                "stops": [*params.stops, *stops],
                # the same seed again would say the same again
                "seed": None if params.seed is None else (params.seed + number) % 2**32,
            }
        )

    def _message(self, number: int, made: Generation) -> tuple[dict[str, Any], str, list[ToolCall]]:
        ids = made.token_ids.tolist()
        while ids and ids[-1] in self._eos_ids:
            ids.pop()
        raw = str(self._tokenizer.decode(ids, skip_special_tokens=False))
        found = PARSERS[self._parser](raw) if self._parser else []
        calls = [call.model_copy(update={"id": f"call_{number}_{place}"}) for place, call in enumerate(found)]
        text = str(self._tokenizer.decode(ids, skip_special_tokens=True))
        if not calls:
            return {"role": "assistant", "content": text}, text, []
        content = raw.partition(CALL_MARKS[self._parser])[0].strip()
        return (
            {"role": "assistant", "content": content, "tool_calls": [_as_openai(call) for call in calls]},
            text,
            calls,
        )


def _as_openai(call: ToolCall) -> dict[str, Any]:
    """What cannot be read goes to the agent as it is: telling the model is its part."""
    arguments = call.raw_arguments if call.arguments is None else orjson.dumps(call.arguments).decode()
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _for_template(message: dict[str, Any]) -> dict[str, Any]:
    """A message as chat templates want it: arguments of calls as maps."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = dict(call["function"])
        with suppress(orjson.JSONDecodeError):
            function["arguments"] = orjson.loads(function["arguments"])
        calls.append(call | {"function": function})
    return message | {"tool_calls": calls}
