"""Define which sampling fields a request may set, and share a session's tokens between requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from msgspec import structs

from buffer.errors import ConfigError
from buffer.wire.sampling import SampleParams, StructuredOutput
from producer_workers.agent_loops.tool_parsers import ToolParser
from producer_workers.engines.base import Engine, structures


@dataclass(frozen=True, slots=True)
class SamplingOverrides:
    """The choices of a request; the task sets all others."""

    max_tokens: int | None = None  # None: all tokens that the session has left
    stops: Sequence[str] = ()
    structured: StructuredOutput | None = None  # of `response_format`
    call_one_of: Sequence[str] = ()  # the functions of which `tool_choice` demands a call

    def forcing_a_call(self, parser: ToolParser | None) -> SamplingOverrides:
        """Return these with the structure of a call. Raises ConfigError if it has none."""
        structure = parser.structure(self.call_one_of) if parser else None
        if structure is None:
            raise ConfigError(
                "tool_choice: this task's tool parser has no form in which a call can be enforced; "
                "ask with tool_choice auto, or use the parser hermes or llama"
            )
        if self.structured is not None:
            raise ConfigError("tool_choice: a call and response_format cannot both be enforced")
        return replace(self, structured=structure)

    def check(self, params: SampleParams, engine: Engine) -> None:
        """Raise ConfigError if the task or its engine does not allow them."""
        if self.structured is None:
            return
        if not structures(engine):
            raise ConfigError(
                "response_format, tool_choice: "
                f"the engine {engine.name} cannot produce structured output"
            )
        if params.structured is not None:
            raise ConfigError(
                "response_format, tool_choice: "
                "the task already sets a structure (sample.structured)"
            )

    def applied_to(self, params: SampleParams, number: int, allowed: int) -> SampleParams:
        """Return the parameters of a session's request `number`, limited to `allowed` tokens."""
        return structs.replace(
            params.attempt(number),
            max_tokens=allowed,
            min_tokens=0,
            stops=[*params.stops, *self.stops],
            structured=self.structured or params.structured,
        )


def structure_of(response_format: Any) -> StructuredOutput | None:
    """Return OpenAI's `response_format` as a structure, None for plain text. Raises ValueError."""
    match response_format:
        case None | {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return StructuredOutput(json_schema={"type": "object"})
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
            return StructuredOutput(json_schema=schema)
    raise ValueError(
        'expected {"type": "text"}, {"type": "json_object"}, or json_schema with its schema'
    )


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
