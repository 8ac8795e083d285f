"""Keep all requests of one run of an agent, as the tokens that were read and sampled.

    request ──▶ it continues a segment ──▶ that segment's ids, then tokens of the new messages
            └─▶ it continues none (another prompt, an edited or cut history) ──▶ a new segment

If two requests continue the same segment (a second attempt, two tools at once), its tokens are
trained with the first answer and are only context for the others.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any, cast

import numpy as np
import orjson
from msgspec import structs
from numpy.typing import NDArray

from buffer.errors import ConfigError, RolloutMQError
from buffer.wire.rollout import ToolCall
from buffer.wire.sampling import SampleParams
from producer_workers.agent_loops.chat_delta import ChatDelta
from producer_workers.agent_loops.tokenizer import Tokenizer, encode_chat, in_tokenizer_thread
from producer_workers.agent_loops.tool_parsers import ParsedTurn, ToolParser
from producer_workers.engines.base import Engine, Generation, context_length
from producer_workers.gateway.segment import Messages, Segment
from producer_workers.gateway.turn import Ask, SampledTurn

log = logging.getLogger("rolloutmq.worker")

_RAW = "raw"  # in place of tools and of the role: no chat template wrote this segment

MOST_SEGMENTS = 256  # per session; each is a rollout with a whole context

_FULL = "this model's maximum context length is reached: all max_tokens of the session are used up"
# Agents recognize the end of a context by these words.
_LONG = "this model's maximum context length is {} tokens, and the messages have {}"


class SessionClosed(RolloutMQError):
    """The session generates nothing more: its tokens are used up, or it was interrupted."""


class ContextFull(RolloutMQError):
    """The messages of a request fill the model's context; shorter ones may fit."""


class TokenBudget:
    """The tokens of one session; `left` are not sampled yet.

    Invariant: sampled tokens and reserved tokens together never exceed the session's tokens. A
    request reserves what it may need and returns what it did not use.
    """

    def __init__(self, tokens: int) -> None:
        self.left = tokens
        self._reserved = 0
        self._queue = asyncio.Lock()  # requests reserve in the order of their arrival
        self._returned = asyncio.Event()

    @asynccontextmanager
    async def reserve(self, wanted: int | None) -> AsyncIterator[int]:
        """Reserve up to `wanted` tokens (None: all) and yield how many may be sampled, perhaps 0.

        It waits until running requests leave that many, in the order of arrival. So requests
        without a limit run one after another.
        """
        async with self._queue:
            while self._reserved and self.left - self._reserved < self._limit(wanted):
                self._returned.clear()
                await self._returned.wait()
            allowed = min(self._limit(wanted), self.left)
            self._reserved += allowed
        try:
            yield allowed
        finally:
            self._reserved -= allowed
            self._returned.set()

    def _limit(self, wanted: int | None) -> int:
        return self.left if wanted is None else wanted

    def spend(self, tokens: int) -> None:
        self.left -= tokens


class Session:
    """The requests of one rollout. An interrupted session continues with its `finished` segments.

    `params` are the task's; `max_tokens` limits the whole session. `truncation` is why the last
    request was refused or cut off, or "".
    """

    def __init__(
        self,
        name: str,
        engine: Engine,
        tokenizer: Tokenizer,
        delta: ChatDelta,
        eos_ids: Collection[int],
        params: SampleParams,
        parser: ToolParser | None,
        finished: Sequence[Segment] = (),
    ) -> None:
        self.name = name
        self._engine = engine
        self._tokenizer = tokenizer
        self._delta = delta
        self._eos_ids = frozenset(eos_ids)
        self._params = params
        self._parser = parser
        turns = sum(int((np.diff(s.mask, prepend=np.uint8(0)) == 1).sum()) for s in finished)
        # requests count on, so that none has the seed of an earlier one
        self._requests = itertools.count(turns)
        self._running = 0
        sampled = sum(int(segment.mask.sum()) for segment in finished)
        self._budget = TokenBudget(params.max_tokens - sampled)
        self._seen = [*finished]
        self.truncation = ""
        self.segments = [*finished]
        self.interrupted = asyncio.Event()

    @property
    def is_full(self) -> bool:
        return self._budget.left <= 0

    async def ask(self, ask: Ask) -> SampledTurn:
        """Sample one turn; a cancelled call trains nothing.

        Raises SessionClosed, ContextFull, GenerationError, or ConfigError for an unsupported call.
        """
        ask = ask.forcing_a_call(self._parser)
        self._check_open()
        ask.check(self._params, self._engine)
        self._running += 1
        try:
            return await (self._complete if ask.prompt else self._chat)(next(self._requests), ask)
        finally:
            self._running -= 1

    async def _chat(self, number: int, ask: Ask) -> SampledTurn:
        messages = self._delta.readable(ask.messages)
        parent, context = await in_tokenizer_thread(self._context, messages, ask.tools)
        made = await self._generate(number, parent, context, ask)
        message, text, calls = await in_tokenizer_thread(
            self._message, number, made, ask.stops, ask.tools
        )
        self._keep(parent, context, made, [*messages, message], text, calls)
        return SampledTurn(message, made, len(context.ids))

    async def _complete(self, number: int, ask: Ask) -> SampledTurn:
        parent, context = await in_tokenizer_thread(self._raw_context, ask.prompt)
        made = await self._generate(number, parent, context, ask)
        text = await in_tokenizer_thread(self._text, made, skip_special_tokens=True)
        messages = [{"role": _RAW, "content": _content(context) + text}]
        self._keep(parent, context, made, messages, text, [])
        message = {"role": "assistant", "content": _before(text, ask.stops)}
        return SampledTurn(message, made, len(context.ids))

    def _check_open(self) -> None:
        if self.interrupted.is_set():
            raise SessionClosed("interrupted")
        if self.is_full:
            self.truncation = _FULL
            raise SessionClosed(_FULL)

    def _check_room(self, parent: Segment | None) -> None:
        """Raise if the running requests could need more than MOST_SEGMENTS."""
        adds_one = parent not in self.segments or self._running > 1
        if adds_one and len(self.segments) + self._running > MOST_SEGMENTS:
            raise ConfigError(
                f"this session has {MOST_SEGMENTS} contexts, the limit: continue one of them"
            )

    def _fills_context(self, tokens: int) -> bool:
        """Return whether `tokens` fill the engine's context, and record the truncation if so."""
        context = context_length(self._engine)
        is_full = context is not None and tokens >= context
        self.truncation = _LONG.format(context, tokens) if is_full else ""
        return is_full

    async def _generate(
        self, number: int, parent: Segment | None, context: Segment, ask: Ask
    ) -> Generation:
        self._check_room(parent)
        if self._fills_context(len(context.ids)):
            raise ContextFull(self.truncation)
        async with self._budget.reserve(ask.max_tokens) as allowed:
            # Again: another request may have used up the tokens while this one waited.
            self._check_open()
            params = ask.applied_to(self._params, number, allowed)
            made = await self._engine.generate(f"{self.name}/{number}", context.ids, params)
            self._budget.spend(len(made.token_ids))
        if made.finish_reason == "abort":
            self.interrupted.set()
            raise SessionClosed("interrupted")
        if made.finish_reason == "length":
            self._fills_context(len(context.ids) + len(made.token_ids))
        return made

    def _keep(self, parent: Segment | None, context: Segment, *turn: Any) -> None:
        """Store a turn; if another request has continued its parent, that one trains it."""
        is_first = parent is None or parent in self.segments
        grown = (context if is_first else context.untrained()).add_turn(*turn)
        self._seen.append(grown)
        self.segments = [*(segment for segment in self.segments if segment is not parent), grown]

    def _context(self, messages: Messages, tools: Any) -> tuple[Segment | None, Segment]:
        """Return the segment that the request continues (None: it begins one), and its context."""
        fitting = [segment for segment in self._seen if segment.is_continued_by(messages, tools)]
        if fitting:
            parent = max(fitting, key=lambda segment: len(segment.messages))
            try:
                return parent, parent.read(self._tokens_behind(parent, messages), messages)
            except ConfigError:
                # The template rewrites earlier turns (it may drop the thought), so the model reads
                # a new context.
                log.debug(
                    "new segment: the chat template rewrites earlier turns",
                    extra={"session": self.name},
                )
        try:
            safe = self._delta.harmless([_for_template(message) for message in messages])
            prompt = encode_chat(self._tokenizer, safe, tools)
        except Exception as error:  # a template may raise anything
            raise ConfigError(
                f"the chat template does not accept these messages: {error}"
            ) from error
        return None, Segment.begin(messages, tools, prompt)

    def _tokens_behind(self, parent: Segment, messages: Messages) -> NDArray[np.int32]:
        """Return the tokens that `messages` add to a segment. Raises ConfigError."""
        was_ended = len(parent.ids) > 0 and int(parent.ids[-1]) in self._eos_ids
        turns = [each for each in parent.messages if each["role"] == "assistant"]
        has_thought = any("</think>" in str(turn["content"]) for turn in turns)
        new = [_for_template(message) for message in messages[len(parent.messages) :]]
        return self._delta.tokens(new, end_turn=not was_ended, has_thought=has_thought)

    def _raw_context(self, prompt: str | list[int]) -> tuple[Segment | None, Segment]:
        """Do as `_context` for a text or tokens, which continue a segment that they begin with."""
        if isinstance(prompt, str):
            fitting = [s for s in self._seen if s.tools == _RAW and prompt.startswith(_content(s))]
            parent = max(fitting, key=lambda segment: len(segment.ids), default=None)
            # Special tokens that are written out count: this agent writes the chat format itself.
            rest = prompt.removeprefix(_content(parent)) if parent else prompt
            new = list(cast(Any, self._tokenizer).encode(rest, add_special_tokens=False))
        else:
            fitting = [s for s in self._seen if s.ids.tolist() == prompt[: len(s.ids)]]
            parent = max(fitting, key=lambda segment: len(segment.ids), default=None)
            new = prompt[len(parent.ids) :] if parent else prompt
            prompt = str(self._tokenizer.decode(prompt, skip_special_tokens=False))
        messages = [{"role": _RAW, "content": prompt}]
        if parent is None:
            return None, Segment.begin(messages, _RAW, new)
        return parent, replace(parent.read(np.array(new, "<i4"), messages), tools=_RAW)

    def _text(self, made: Generation, *, skip_special_tokens: bool) -> str:
        ids = made.token_ids.tolist()
        while ids and ids[-1] in self._eos_ids:
            ids.pop()
        return str(self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))

    def _message(
        self, number: int, made: Generation, stops: Sequence[str], tools: Any
    ) -> tuple[dict[str, Any], str, list[ToolCall]]:
        """Return the agent's message, the whole text, and the calls of offered tools."""
        raw = self._text(made, skip_special_tokens=False)
        parsed = self._parser.parse(raw, tools) if self._parser and tools else ParsedTurn(raw, [])
        calls = [
            structs.replace(call, id=f"call_{number}_{position}")
            for position, call in enumerate(parsed.calls)
        ]
        text = self._text(made, skip_special_tokens=True)
        if not calls:
            return {"role": "assistant", "content": _before(text, stops)}, text, []
        message = {
            "role": "assistant",
            "content": parsed.content.strip(),
            "tool_calls": [_as_openai(call) for call in calls],
        }
        return message, text, calls


def _before(text: str, stops: Sequence[str]) -> str:
    """Return the text before the first stop string, as the API does; its tokens were sampled."""
    found = [text.find(stop) for stop in stops if stop in text]
    return text[: min(found, default=len(text))]


def _content(segment: Segment) -> str:
    return str(segment.messages[0]["content"])


def _as_openai(call: ToolCall) -> dict[str, Any]:
    """Return a call in OpenAI's form; an unreadable one stays as it is."""
    arguments = (
        call.raw_arguments if call.arguments is None else orjson.dumps(call.arguments).decode()
    )
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": arguments},
    }


def _for_template(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with arguments of calls as maps, as chat templates expect it."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = dict(call["function"])
        with suppress(orjson.JSONDecodeError):
            function["arguments"] = orjson.loads(function["arguments"])
        calls.append({**call, "function": function})
    return {**message, "tool_calls": calls}
