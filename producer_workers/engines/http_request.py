"""One response that a server makes in one or more parts, each behind the tokens of those before."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from buffer.rollout import PolicyVersion, SampleParams, VersionSpan
from producer_workers.engines.base import FinishReason, Generation
from producer_workers.engines.completion_server import Piece

REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length"}
"""Reasons that end a response; any other one ("abort") only ends a part of it."""


class HttpRequest:
    """What one `generate` has so far. `finish_reason` is None while there is more to come."""

    def __init__(self, request_id: str, prompt_ids: NDArray[np.int32], params: SampleParams) -> None:
        self.group = request_id.partition("/")[0]
        self._prompt, self._params = prompt_ids.tolist(), params
        self._token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._spans: list[VersionSpan] = []
        self.finish_reason: FinishReason | None = None

    def prompt(self) -> list[int]:
        """What the next part comes behind."""
        return [*self._prompt, *self._token_ids]

    def sampling(self) -> dict[str, Any]:
        """The fields of a completion request for what is left; every one, as servers have defaults of their own."""
        params, done = self._params, len(self._token_ids)
        return {
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k,
            "min_p": 0.0,
            "max_tokens": params.max_tokens - done,
            "min_tokens": max(0, params.min_tokens - done),
            "stop": params.stops,
            "stop_token_ids": params.stop_token_ids,
            "seed": params.seed,
            "repetition_penalty": params.repetition_penalty,
            "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty,
        }

    def add(self, piece: Piece) -> None:
        self._token_ids += piece.token_ids
        self._logprobs += piece.logprobs
        if reason := REASONS.get(piece.finish_reason or ""):
            self.finish_reason = reason
        elif len(self._token_ids) >= self._params.max_tokens:
            self.finish_reason = "length"

    def stamp(self, version: PolicyVersion) -> None:
        """Say that the tokens since the last stamp were made by `version`; one span for parts of one version."""
        start = self._spans[-1].start + self._spans[-1].length if self._spans else 0
        length = len(self._token_ids) - start
        if not length:
            return
        if self._spans and (self._spans[-1].lineage, self._spans[-1].version) == version:
            last = self._spans.pop()
            start, length = last.start, last.length + length
        self._spans.append(VersionSpan(start, length, version.version, version.lineage))

    def finish(self, reason: FinishReason) -> None:
        """End it here, unless it has ended."""
        self.finish_reason = self.finish_reason or reason

    def generation(self) -> Generation:
        assert self.finish_reason is not None
        token_ids, logprobs = np.asarray(self._token_ids, dtype="<i4"), np.asarray(self._logprobs, dtype="<f4")
        return Generation(token_ids, logprobs, tuple(self._spans), self.finish_reason)
