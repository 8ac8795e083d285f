"""A session: all that one run of an agent asks the model, kept as the tokens that were really read
and sampled.

    request ──▶ it continues a segment ──▶ that segment's ids, and the tokens of what is new behind them
            └─▶ it continues none (another prompt, a history that was cut or edited) ──▶ a new segment

Where two requests continue the same segment (a second attempt, two tools at once), its tokens are
trained with the first answer, and are context alone for the others.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import orjson

from buffer.errors import ConfigError, RolloutMQError
from buffer.model.rollout import SampleParams, ToolCall
from producer_workers.agent_loops.chat_delta import ChatDelta
from producer_workers.agent_loops.gateway.sampling_overrides import Wishes
from producer_workers.agent_loops.gateway.segment import Messages, Segment
from producer_workers.agent_loops.gateway.token_budget import TokenBudget
from producer_workers.agent_loops.tokenizer import Tokenizer, aside, encode_chat
from producer_workers.agent_loops.tool_parsers import PARSERS, before_calls
from producer_workers.engines.base import Engine, Generation

log = logging.getLogger("rolloutmq.worker")

_RAW = "raw"
"""In place of tools: a segment of text, or tokens, that no chat template wrote; its only message
has it as its role.
"""

MOST_SEGMENTS = 256
"""Of one session. Each is a rollout with a whole context of its own, so they are what a session's
bytes come from.
"""


_FULL = "this model's maximum context length is reached: all max_tokens of the session are used up"
"""In words by which agents know the matter."""


class SessionClosed(RolloutMQError):
    """Nothing more is generated for this session: its budget is used up, or it was interrupted."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One answer of the model: its message in OpenAI's form, and what it took."""

    message: dict[str, Any]
    made: Generation
    prompt_tokens: int


class Session:
    """Of one rollout. `params`: the task's; `max_tokens` of it is for all that is sampled in the
    session.
    """

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
        self.name = name
        self._engine = engine
        self._tokenizer = tokenizer
        self._delta = delta
        self._eos_ids = frozenset(eos_ids)
        self._params = params
        self._parser = parser
        self._requests = itertools.count()
        self._running = 0
        self._budget = TokenBudget(params.max_tokens)
        self._seen: list[Segment] = []
        self.segments: list[Segment] = []
        self.interrupted = asyncio.Event()

    @property
    def is_full(self) -> bool:
        return self._budget.left <= 0

    async def chat(self, messages: Messages, tools: Any, wishes: Wishes) -> Turn:
        """One turn of the model. Raises SessionClosed, ConfigError (what cannot be asked),
        GenerationError.

        One that is cancelled is as if it had never been asked: nothing of it is trained.
        """
        with self._request(wishes) as number:
            parent, context = await aside(self._context, messages, tools)
            made = await self._generate(number, parent, context, wishes)
            message, text, calls = await aside(
                self._message, number, made, wishes.stops, bool(tools)
            )
            self._keep(parent, context, made, [*messages, message], text, calls)
            return Turn(message, made, len(context.ids))

    async def complete(self, prompt: str | list[int], wishes: Wishes) -> Turn:
        """What comes behind a text, or behind tokens. Raises as `chat` does."""
        with self._request(wishes) as number:
            parent, context = await aside(self._raw_context, prompt)
            made = await self._generate(number, parent, context, wishes)
            text = await aside(self._text, made, skip_special_tokens=True)
            self._keep(
                parent,
                context,
                made,
                [{"role": _RAW, "content": _content(context) + text}],
                text,
                [],
            )
            return Turn(
                {"role": "assistant", "content": _before(text, wishes.stops)},
                made,
                len(context.ids),
            )

    @contextmanager
    def _request(self, wishes: Wishes) -> Iterator[int]:
        """One request, from its beginning to its end: its number."""
        self._check_open()
        wishes.check(self._params, self._engine)
        self._running += 1
        try:
            yield next(self._requests)
        finally:
            self._running -= 1

    def _check_open(self) -> None:
        if self.interrupted.is_set() or self.is_full:
            raise SessionClosed("interrupted" if self.interrupted.is_set() else _FULL)

    def _check_room(self, parent: Segment | None) -> None:
        """Whatever runs may become a segment of its own."""
        adds_one = parent not in self.segments or self._running > 1
        if adds_one and len(self.segments) + self._running > MOST_SEGMENTS:
            raise ConfigError(
                f"this session has {MOST_SEGMENTS} contexts, and no more: go on with one of them"
            )

    async def _generate(
        self, number: int, parent: Segment | None, context: Segment, wishes: Wishes
    ) -> Generation:
        self._check_room(parent)
        async with self._budget.reserve(wishes.max_tokens) as allowed:
            self._check_open()  # again, since another request may have used up the tokens while this one waited
            params = wishes.applied_to(self._params, number, allowed)
            made = await self._engine.generate(f"{self.name}/{number}", context.ids, params)
            self._budget.spend(len(made.token_ids))
        if made.finish_reason == "abort":
            self.interrupted.set()
            raise SessionClosed("interrupted")
        return made

    def _keep(self, parent: Segment | None, context: Segment, *turn: Any) -> None:
        """Note a turn; where another request went on from the same parent meanwhile, that one
        trains it.
        """
        is_first = parent is None or parent in self.segments
        grown = (context if is_first else context.untrained()).say(*turn)
        self._seen.append(grown)
        self.segments = [segment for segment in self.segments if segment is not parent] + [grown]

    def _parent(self, messages: Messages, tools: Any) -> Segment | None:
        """The longest of all contexts there ever were that these messages continue."""
        fitting = [segment for segment in self._seen if segment.is_continued_by(messages, tools)]
        return max(fitting, key=lambda segment: len(segment.messages), default=None)

    def _context(self, messages: Messages, tools: Any) -> tuple[Segment | None, Segment]:
        """(the segment that goes on, None for a new one; what the model is given)"""
        parent = self._parent(messages, tools)
        if parent is not None:
            was_ended = len(parent.ids) > 0 and int(parent.ids[-1]) in self._eos_ids
            has_thought = any(
                "</think>" in str(said["content"])
                for said in parent.messages
                if said["role"] == "assistant"
            )
            new = [_for_template(message) for message in messages[len(parent.messages) :]]
            try:
                tokens = self._delta.tokens(new, end_turn=not was_ended, has_thought=has_thought)
                return parent, parent.read(tokens, messages)
            except ConfigError:
                # the template writes earlier turns anew (drops what was thought, say): so does what
                # the model reads
                log.debug(
                    "a chat template that rewrites earlier turns: a new segment",
                    extra={"session": self.name},
                )
        try:
            said = self._delta.harmless([_for_template(message) for message in messages])
            prompt = encode_chat(self._tokenizer, said, tools)
        except (
            Exception
        ) as error:  # templates are programs of the model's authors: they raise what they like
            raise ConfigError(f"the chat template does not take these messages: {error}") from error
        return None, Segment.begin(messages, tools, prompt)

    def _raw_context(self, prompt: str | list[int]) -> tuple[Segment | None, Segment]:
        """The same for a text or tokens without a chat: a segment goes on where the prompt begins
        with all of it.
        """
        if isinstance(prompt, str):
            fitting = [s for s in self._seen if s.tools == _RAW and prompt.startswith(_content(s))]
            parent = max(fitting, key=lambda segment: len(segment.ids), default=None)
            new = self._encode(prompt.removeprefix(_content(parent)) if parent else prompt)
        else:
            fitting = [s for s in self._seen if s.ids.tolist() == prompt[: len(s.ids)]]
            parent = max(fitting, key=lambda segment: len(segment.ids), default=None)
            new = prompt[len(parent.ids) :] if parent else prompt
            prompt = str(self._tokenizer.decode(prompt, skip_special_tokens=False))
        said = [{"role": _RAW, "content": prompt}]
        if parent is None:
            return None, Segment.begin(said, _RAW, new)
        return parent, replace(parent.read(np.array(new, "<i4"), said), tools=_RAW)

    def _encode(self, text: str) -> list[int]:
        # special tokens that are written out are meant: whoever asks for a text writes the chat by
        # itself
        return [
            int(token)
            for token in cast(Any, self._tokenizer).encode(text, add_special_tokens=False)
        ]

    def _text(self, made: Generation, *, skip_special_tokens: bool) -> str:
        ids = made.token_ids.tolist()
        while ids and ids[-1] in self._eos_ids:
            ids.pop()
        return str(self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))

    def _message(
        self, number: int, made: Generation, stops: Sequence[str], has_tools: bool
    ) -> tuple[dict[str, Any], str, list[ToolCall]]:
        """(what the agent is told, the whole text, calls); whoever offers no tools reads calls as
        text.
        """
        raw = self._text(made, skip_special_tokens=False)
        found = PARSERS[self._parser](raw) if self._parser and has_tools else []
        calls = [
            call.model_copy(update={"id": f"call_{number}_{place}"})
            for place, call in enumerate(found)
        ]
        text = self._text(made, skip_special_tokens=True)
        if not calls:
            return {"role": "assistant", "content": _before(text, stops)}, text, []
        content = before_calls(raw, self._parser).strip()
        told = {
            "role": "assistant",
            "content": content,
            "tool_calls": [_as_openai(call) for call in calls],
        }
        return told, text, calls


def _before(text: str, stops: Sequence[str]) -> str:
    """What the API gives of a text that a stop string ended; the tokens of that string were sampled
    all the same.
    """
    return text[
        : min((place for stop in stops if (place := text.find(stop)) >= 0), default=len(text))
    ]


def _content(segment: Segment) -> str:
    return str(segment.messages[0]["content"])


def _as_openai(call: ToolCall) -> dict[str, Any]:
    """What cannot be read goes to the agent as it is: telling the model is its part."""
    arguments = (
        call.raw_arguments if call.arguments is None else orjson.dumps(call.arguments).decode()
    )
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": arguments},
    }


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
