"""Read requests of an earlier run for the simulated engine: their lengths and latencies."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from buffer.config.sections.engine import SimulatedConfig
from producer_workers.engines.base import EngineError


class TracedRequest(BaseModel):
    """One line of a trace, as JSON. A latency that is missing is drawn."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tokens: int = Field(ge=1)
    first_token_s: float | None = Field(None, ge=0)
    token_s: float | None = Field(None, ge=0)


class Pace(NamedTuple):
    """The tokens of a simulated response, and seconds to the first and for each other one."""

    tokens: int
    first_token_s: float
    token_s: float


def draw_pace(
    rng: np.random.Generator, config: SimulatedConfig, trace: Sequence[TracedRequest]
) -> Pace:
    """Draw the pace of one request of the trace.

    The distributions of `config` supply what it lacks, or everything where there is no trace.
    """
    traced = trace[int(rng.integers(len(trace)))] if trace else None
    tokens = traced.tokens if traced else round(config.response_tokens.draw(rng))
    first_token_s = traced.first_token_s if traced else None
    if first_token_s is None:
        first_token_s = config.first_token_s.draw(rng)
    token_s = traced.token_s if traced else None
    if token_s is None:
        token_s = config.token_s.draw(rng)
    return Pace(tokens, first_token_s, token_s)


def read_trace(path: Path) -> list[TracedRequest]:
    """Read all lines of a JSONL file. Raises EngineError naming the line."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise EngineError(f"the trace {path} cannot be read: {error}") from error
    requests = [_parse(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not requests:
        raise EngineError(
            f"the trace {path} holds no requests",
            hint='expected one {"tokens": 812, "token_s": 0.01} in each line',
        )
    return requests


def _parse(path: Path, number: int, line: bytes) -> TracedRequest:
    try:
        return TracedRequest.model_validate_json(line)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the line"
        hint = "expected tokens, and first_token_s and token_s where they are known"
        raise EngineError(f"{path}, line {number}: {where}: {first['msg']}", hint=hint) from error
