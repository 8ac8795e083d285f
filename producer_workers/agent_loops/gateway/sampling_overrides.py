"""What of a request's sampling is the agent's to say; all else is the task's, for the trainer
counts on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from buffer.errors import ConfigError
from buffer.model.rollout import SampleParams, StructuredOutput
from producer_workers.engines.base import Engine, structures


@dataclass(frozen=True, slots=True)
class Wishes:
    """max_tokens: None for all that the session has left. structured: what `response_format` asks
    for.
    """

    max_tokens: int | None = None
    stops: Sequence[str] = ()
    structured: StructuredOutput | None = None

    def check(self, params: SampleParams, engine: Engine) -> None:
        """Raises ConfigError where the task, or its engine, does not grant them."""
        if self.structured is None:
            return
        if not structures(engine):
            raise ConfigError(
                f"response_format: the engine {engine.name} cannot produce structured output"
            )
        if params.structured is not None:
            raise ConfigError(
                "response_format: the task has a structure of its own (sample.structured)"
            )

    def applied_to(self, params: SampleParams, number: int, allowed: int) -> SampleParams:
        """The task's parameters for request `number` of a session, which may sample `allowed`
        tokens.
        """
        return params.model_copy(
            update={
                "max_tokens": allowed,
                "min_tokens": 0,
                "stops": [*params.stops, *self.stops],
                "structured": self.structured or params.structured,
                # the same seed again would say the same again
                "seed": None if params.seed is None else (params.seed + number) % 2**32,
            }
        )


def structure_of(response_format: Any) -> StructuredOutput | None:
    """OpenAI's `response_format` as a structure; None for plain text. ValueError for what is
    neither.
    """
    match response_format:
        case None | {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return StructuredOutput(json_schema={"type": "object"})
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
            return StructuredOutput(json_schema=schema)
    raise ValueError('{"type": "text"}, {"type": "json_object"}, or json_schema with its schema')
