"""Hold one request of an agent and its answer, in the one form that every dialect is parsed to."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from msgspec import structs

from buffer.errors import ConfigError
from buffer.wire.rollout import ToolCall
from buffer.wire.sampling import SampleParams, StructuredOutput
from producer_workers.agent_loops.call_json import write_json
from producer_workers.agent_loops.tool_parsers import ToolParser
from producer_workers.engines.base import Engine, Generation, structures
from rolloutmq.extensions.gateway.history import Messages


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


new_name = partial(secrets.token_hex, 8)


@dataclass(frozen=True, slots=True)
class Ask:
    """A request: messages, or a prompt without a chat template; the task sets all other sampling.

    Messages and tools are in the form of OpenAI's chat completions. `previous`: the name of an
    answer whose conversation comes before the messages ("": none does; None: it is not kept).
    """

    messages: Messages = ()
    instructions: str = ""  # a system prompt, which is no part of the conversation that is kept
    previous: str | None = None
    tools: Any = None
    prompt: str | list[int] = ""  # text or tokens, in place of messages
    max_tokens: int | None = None  # None: all tokens that the session has left
    stops: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    structured: StructuredOutput | None = None
    call_one_of: Sequence[str] = ()  # the functions of which one must be called
    name: str = field(default_factory=new_name)  # of its answer
    size: int = 0  # bytes of the request

    def forcing_a_call(self, parser: ToolParser | None) -> Ask:
        """Return this with the structure of a demanded call. Raises ConfigError if it has none."""
        if not self.call_one_of:
            return self
        structure = parser.structure(self.call_one_of) if parser else None
        if structure is None:
            raise ConfigError(
                "tool_choice: this task's tool parser has no form in which a call can be enforced; "
                "ask with tool_choice auto, or use the parser hermes"
            )
        if self.structured is not None:
            raise ConfigError("tool_choice: a call and response_format cannot both be enforced")
        return replace(self, structured=structure)

    def check(self, params: SampleParams, engine: Engine) -> None:
        """Raise ConfigError if the task or its engine does not allow the structure."""
        if self.structured is None:
            return
        if not structures(engine):
            why = f"the engine {engine.name} cannot produce structured output"
        elif params.structured is not None:
            why = "the task already sets a structure (sample.structured)"
        else:
            return
        raise ConfigError(f"response_format, tool_choice: {why}")

    def applied_to(self, params: SampleParams, number: int, allowed: int) -> SampleParams:
        """Return the parameters of a session's request `number`, limited to `allowed` tokens."""
        return structs.replace(
            params.attempt(number),
            max_tokens=allowed,
            min_tokens=0,
            stops=[*params.stops, *self.stops],
            stop_token_ids=[*params.stop_token_ids, *self.stop_token_ids],
            structured=self.structured or params.structured,
        )


@dataclass(frozen=True, slots=True)
class SampledTurn:
    """The answer: a message in OpenAI's form, and what the engine made.

    `stop` is the stop string before which the message was cut off, or "".
    """

    name: str
    message: dict[str, Any]
    made: Generation
    prompt_tokens: int
    stop: str = ""

    @property
    def calls(self) -> list[dict[str, Any]]:
        return self.message.get("tool_calls") or []

    @property
    def finish_reason(self) -> str:
        return "tool_calls" if self.calls else self.made.finish_reason


def as_openai(call: ToolCall) -> dict[str, Any]:
    """Return a call in OpenAI's form; an unreadable one stays as it is."""
    arguments = call.raw_arguments if call.arguments is None else write_json(call.arguments)
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": arguments},
    }
