"""Keep all requests of one run of an agent, as the tokens that were read and sampled.

    request ──▶ it continues a segment ──▶ that segment's ids, then tokens of the new messages
            └─▶ it continues none (`why_new`) ──▶ a new segment, which is counted

If two requests continue the same segment (a second attempt, two tools at once), its tokens are
trained with the first answer and are only context for the others.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from buffer.errors import ConfigError, RolloutMQError
from buffer.wire.rollout import ToolCall
from buffer.wire.sampling import SampleParams
from producer_workers.agent_loops.call_json import read_json
from producer_workers.agent_loops.chat_delta import ChatDelta
from producer_workers.agent_loops.tokenizer import (
    BYTES_PER_TOKEN,
    Tokenizer,
    encode_chat,
    in_thread_of_texts,
    in_tokenizer_thread,
)
from producer_workers.agent_loops.tool_parsers import ParsedTurn, ToolParser
from producer_workers.datasets.row_values import byte_count
from producer_workers.engines.base import Engine, FinishReason, Generation, context_length
from rolloutmq.extensions.gateway.history import Conversation, Messages, said_in
from rolloutmq.extensions.gateway.kept_turns import TurnWriter
from rolloutmq.extensions.gateway.known_messages import Continued, Known
from rolloutmq.extensions.gateway.segment import Segment, TurnEnd, continued_by, why_new
from rolloutmq.extensions.gateway.session_record import check_storable
from rolloutmq.extensions.gateway.turn import Ask, SampledTurn, TokenBudget, as_openai

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


@dataclass(slots=True, eq=False)
class _Request:
    """A request that is being answered. `after`: how many answers came before it."""

    number: int
    after: int
    parent: Segment | None = None  # that it continues


class RequestContext(NamedTuple):
    """What the model reads for a request; `why` it begins a context ("": it does not)."""

    parent: Segment | None
    context: Segment
    why: str = ""


class Session:
    """The requests of one rollout. An interrupted session continues with its `finished` segments.

    `params` are the task's; `max_tokens` limits the whole session. `truncation` is why the last
    request was refused or cut off, or "". `new_contexts` counts segments but the first by reason.
    The last of `segments` has the turn that was asked last.
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
        writer: TurnWriter | None = None,
        role: str = "",
    ) -> None:
        self.name = name
        self._engine = engine
        self._tokenizer = tokenizer
        self._delta = delta
        self._eos_ids = frozenset(eos_ids)
        self._params = params
        self._parser = parser
        self._writer = writer
        self._role = role
        sampled = sum(int(segment.mask.sum()) for segment in finished)
        # Each recorded turn has a token, so no request has the seed of an earlier one.
        self._numbers = itertools.count(sampled)
        self._running: set[_Request] = set()
        self._answered = max((1 + segment.ends[-1].after for segment in finished), default=0)
        self._budget = TokenBudget(params.max_tokens - sampled)
        self.new_contexts: Counter[str] = Counter()
        self.truncation = ""
        self.segments = [*finished]
        self.unsent: list[Segment] = []  # their last turns: a program may have got no answer
        self.interrupted = asyncio.Event()
        self.known: Known = {}
        self._opening = Continued(lambda text: {"role": "system", "content": text}, str)
        self._readable = Continued(self._make_readable)
        self._sizes = Continued[Any, int](lambda message: byte_count(message, 2**62))
        self._said = Continued(said_in)

    @property
    def is_full(self) -> bool:
        return self._budget.left <= 0

    async def ask(self, ask: Ask) -> SampledTurn:
        """Sample one turn; a cancelled call trains nothing.

        Raises SessionClosed, ContextFull, GenerationError, or ConfigError or WireError for what
        cannot be asked or stored.
        """
        ask = ask.forcing_a_call(self._parser)
        if self.unsent and (turn := await in_thread_of_texts(ask.size, self._recorded, ask)):
            return turn
        self._check_open()
        ask.check(self._params, self._engine)
        request = _Request(next(self._numbers), self._answered)
        self._running.add(request)
        try:
            return await self._sample(request, ask)
        finally:
            self._running.remove(request)

    def _recorded(self, ask: Ask) -> SampledTurn | None:
        """Return the answer to a request, once, if it was made but perhaps not sent."""
        if ask.prompt:
            return None
        given = Conversation.join(self._said.each(self._messages(ask)))
        for segment in self.unsent:
            count = len(given.turns)
            is_same = count + 1 == len(segment.said.turns) and given.shared(segment.said) == count
            if is_same and segment.tools == ask.tools:
                self.unsent.remove(segment)
                return _sampled(segment, segment.ends[-1])
        return None

    def answered(self, name: str) -> SampledTurn | None:
        """Return an earlier answer by its name."""
        found = self._turn_named(name)
        return found and _sampled(*found)

    def _turn_named(self, name: str) -> tuple[Segment, TurnEnd] | None:
        turns = ((segment, end) for segment in self.segments for end in segment.ends)
        return next((turn for turn in turns if turn[1].name == name), None) if name else None

    async def stored(self) -> None:
        """Wait until all turns so far outlive this worker, if the agent can be resumed.

        Raises Fenced if the group has another owner.
        """
        if self._writer:
            await self._writer.stored()

    async def count(self, ask: Ask) -> int:
        """Return how many tokens the model would read. Raises ConfigError or WireError."""
        if ask.messages and ask.messages[-1]["role"] == "assistant":  # it is counted, not asked
            ask = replace(ask, messages=[*ask.messages, {"role": "user", "content": ""}])
        reading = await in_thread_of_texts(ask.size, self._context, ask)
        return len(reading.context.ids)

    async def _sample(self, request: _Request, ask: Ask) -> SampledTurn:
        reading = await in_thread_of_texts(ask.size, self._claim, request, ask)
        made = await self._generate(request, reading, ask)
        read = len(reading.context.ids)
        turn, text, calls = await in_tokenizer_thread(self._turn, request, made, ask, read)
        message = {"role": _RAW, "content": text} if ask.prompt else turn.message
        self._keep(request, reading, made, message, text, calls, ask)
        return turn

    def _messages(self, ask: Ask) -> list[dict[str, Any]]:
        """Return what the model is to read, in the form that its template knows."""
        check_storable([], ask.tools)
        opening = self._opening.each([ask.instructions] if ask.instructions else [])
        readable = self._readable.each([*opening, *self._before(ask), *ask.messages])
        messages = self._delta.in_order(readable)
        self._check_bytes(ask.tools, messages)
        return messages

    def _make_readable(self, message: dict[str, Any]) -> dict[str, Any]:
        check_storable([message], None)
        return self._delta.readable(message)

    def _check_bytes(self, texts: Any, messages: Messages = ()) -> None:
        """Raise ContextFull for what is too long to be encoded."""
        if context := context_length(self._engine):
            most = BYTES_PER_TOKEN * context
            if byte_count(texts, most) + sum(self._sizes.each(messages)) > most:
                raise ContextFull(_LONG.format(context, f"over {most} bytes"))

    def _before(self, ask: Ask) -> Messages:
        if not ask.previous:
            return ()
        if not (found := self._turn_named(ask.previous)):
            raise ConfigError(f"this session has no earlier response {ask.previous}")
        segment, end = found
        return segment.messages[end.instructed : end.messages]

    def _check_open(self) -> None:
        if self.interrupted.is_set():
            raise SessionClosed("interrupted")
        if self.is_full:
            self.truncation = _FULL
            raise SessionClosed(_FULL)

    def _check_room(self, parent: Segment | None) -> None:
        """Raise if the running requests could need more than MOST_SEGMENTS."""
        adds_one = parent not in self.segments or len(self._running) > 1
        if adds_one and len(self.segments) + len(self._running) > MOST_SEGMENTS:
            raise ConfigError(
                f"this session has {MOST_SEGMENTS} contexts, the limit: continue one of them"
            )

    def _fills_context(self, tokens: int) -> bool:
        """Return whether `tokens` fill the engine's context, and record the truncation if so."""
        context = context_length(self._engine)
        is_full = context is not None and tokens >= context
        self.truncation = _LONG.format(context, tokens) if is_full else ""
        return is_full

    async def _generate(self, request: _Request, reading: RequestContext, ask: Ask) -> Generation:
        context = reading.context
        self._check_room(reading.parent)
        if self._fills_context(len(context.ids)):
            raise ContextFull(self.truncation)
        async with self._budget.reserve(ask.max_tokens) as allowed:
            # Again: another request may have used up the tokens while this one waited.
            self._check_open()
            params = ask.applied_to(self._params, request.number, allowed)
            name = f"{self.name}/{request.number}"
            made = await self._engine.generate(name, context.ids, params)
            self._budget.spend(len(made.token_ids))
        if made.finish_reason == "abort":
            self.interrupted.set()
            raise SessionClosed("interrupted")
        if made.finish_reason == "length":
            self._fills_context(len(context.ids) + len(made.token_ids))
        return made

    def _keep(
        self,
        request: _Request,
        reading: RequestContext,
        made: Generation,
        message: dict[str, Any],
        text: str,
        calls: Sequence[ToolCall],
        ask: Ask,
    ) -> None:
        """Store a turn; if another request has continued its parent, that one trains it."""
        parent = reading.parent
        is_first = parent is None or parent in self.segments
        context = reading.context if is_first else reading.context.untrained()
        told = (request.after, ask.name, int(bool(ask.instructions)))
        grown = context.add_turn(made, message, text, calls, told)
        why = reading.why if is_first else "branch"
        if parent is None and self.segments:  # another may have begun at the same time
            why = why or "conversation"
        if why:
            self.new_contexts[why] += 1
        self._answered += 1
        others = [segment for segment in self.segments if segment is not parent]
        self.segments = sorted([*others, grown], key=Segment.order)
        if self._writer:
            self._writer.sampled(self._role, parent if is_first else None, grown, why)

    def _claim(self, request: _Request, ask: Ask) -> RequestContext:
        """Return what the model reads; other requests prefer an equal parent that is free."""
        try:
            reading = self._raw_context(ask.prompt) if ask.prompt else self._context(ask)
        except ContextFull as error:
            self.truncation = str(error)
            raise
        request.parent = reading.parent
        return reading

    def _context(self, ask: Ask) -> RequestContext:
        """Return what the model reads; without a parent, it begins a segment."""
        messages, tools = self._messages(ask), ask.tools
        given = Conversation.join(self._said.each(messages))
        segments = self.segments
        claimed = [request.parent for request in [*self._running]]
        free = [segment for segment in segments if segment not in claimed]
        parent = continued_by(segments, given, tools, free)
        why = "template" if parent else why_new(segments, given)
        if parent:
            more = messages[len(parent.messages) :]
            try:
                tokens = self._tokens_behind(parent, more)
                new = Segment.begin(more, given.part(len(parent.messages)), tools, tokens)
                context = parent.then(new)
                # equal turns, but the objects of this request, which the next one has again
                said = replace(context.said, turns=given.turns)
                return RequestContext(parent, replace(context, said=said))
            except ConfigError:
                # The template rewrites earlier turns (it may drop the thought), so the model reads
                # a new context.
                pass
        log.debug("new segment: %s", why or "the first", extra={"session": self.name})
        try:
            prompt = encode_chat(self._tokenizer, list(map(_for_template, messages)), tools)
        except ConfigError:
            raise
        except Exception as error:  # a template may raise anything
            raise ConfigError(
                f"the chat template does not accept these messages: {error}"
            ) from error
        return RequestContext(None, Segment.begin(messages, given, tools, prompt), why)

    def _tokens_behind(self, parent: Segment, messages: Messages) -> NDArray[np.int32]:
        """Return the tokens of `messages` behind a segment. Raises ConfigError."""
        was_ended = len(parent.ids) > 0 and int(parent.ids[-1]) in self._eos_ids
        turns = [each for each in parent.messages if each["role"] == "assistant"]
        has_thought = any("</think>" in str(turn["content"]) for turn in turns)
        new = [_for_template(message) for message in messages]
        return self._delta.tokens(new, end_turn=not was_ended, has_thought=has_thought)

    def _raw_context(self, prompt: str | list[int]) -> RequestContext:
        """Do as `_context` for a text or tokens, which continue a segment that they begin with."""
        if isinstance(prompt, str):
            self._check_bytes(prompt)
        else:
            if self._fills_context(len(prompt)):
                raise ContextFull(self.truncation)
            tokens = np.array(prompt, "<i4")
            if (most := int(tokens.max())) > (largest := self._delta.largest_token or most):
                raise ConfigError(f"this model has no token {most}: its last is {largest}")

        def begins_with(segment: Segment, end: TurnEnd) -> bool:
            if isinstance(prompt, str):
                written = _text_of(segment, end.messages)
                return segment.tools == _RAW and prompt.startswith(written)
            return np.array_equal(segment.ids[: end.tokens], tokens[: end.tokens])

        fitting = [
            next((s.until(end) for end in reversed(s.ends) if begins_with(s, end)), None)
            for s in self.segments
        ]
        parent = max(filter(None, fitting), key=lambda s: len(s.ids), default=None)
        known = parent or Segment.begin([], Conversation.of([]), _RAW, ())
        if isinstance(prompt, str):
            # Special tokens that are written out count: this agent writes the chat format itself.
            text = prompt.removeprefix(_text_of(known, len(known.messages)))
            new = list(cast(Any, self._tokenizer).encode(text, add_special_tokens=False))
        else:
            new = prompt[len(known.ids) :]
            text = str(self._tokenizer.decode(new, skip_special_tokens=False))
        messages = [{"role": _RAW, "content": text}]
        context = known.then(Segment.begin(messages, Conversation.of(messages), _RAW, new))
        return RequestContext(parent, replace(context, tools=_RAW))

    def pieces(self, made: Generation) -> list[str]:
        """Return the text of each token."""
        return [str(self._tokenizer.decode([token])) for token in made.token_ids.tolist()]

    def _text(self, made: Generation, *, skip_special_tokens: bool) -> str:
        ids = made.token_ids.tolist()
        while ids and ids[-1] in self._eos_ids:
            ids.pop()
        return str(self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))

    def _turn(
        self, request: _Request, made: Generation, ask: Ask, prompt_tokens: int
    ) -> tuple[SampledTurn, str, list[ToolCall]]:
        """Return the answer, cut before the first stop string; the whole text; calls of tools."""
        text = self._text(made, skip_special_tokens=True)
        parsed = ParsedTurn(text, [])
        if self._parser and ask.tools:
            parsed = self._parser.parse(self._text(made, skip_special_tokens=False), ask.tools)
        calls = [
            structs.replace(call, id=f"call_{request.number}_{position}")
            for position, call in enumerate(parsed.calls)
        ]
        said = parsed.content.strip() if calls else text
        found = [] if calls else [(text.find(stop), stop) for stop in ask.stops if stop in text]
        end, stop = min(found, default=(len(said), ""))
        message: dict[str, Any] = {"role": "assistant", "content": said[:end]}
        if calls:
            message["tool_calls"] = [as_openai(call) for call in calls]
        # answers stay for a while, and the segment has these
        kept = replace(made, columns={})
        return SampledTurn(ask.name, message, kept, prompt_tokens, stop), text, calls


def _sampled(segment: Segment, end: TurnEnd) -> SampledTurn:
    """Return a turn of a segment, without the versions of its tokens."""
    turn = slice(end.tokens - end.sampled, end.tokens)
    reason = cast(FinishReason, end.finish_reason)
    made = Generation(segment.ids[turn], segment.logprobs[turn], (), reason)
    return SampledTurn(end.name, segment.messages[end.messages - 1], made, turn.start)


def _text_of(segment: Segment, messages: int) -> str:
    return "".join(str(message["content"]) for message in segment.messages[:messages])


def _for_template(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with arguments of calls as maps, as chat templates expect it."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = dict(call["function"])
        with suppress(ValueError):
            function["arguments"] = read_json(function["arguments"])
        calls.append({**call, "function": function})
    return {**message, "tool_calls": calls}
