"""One response that a server makes in one or more parts, each behind the tokens of those before."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from buffer.rollout import SampleParams
from producer_workers.engines.base import FinishReason
from producer_workers.engines.completion_server import Piece
from producer_workers.engines.response import GrowingResponse
from producer_workers.engines.vllm_api import structure_arguments

REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length"}
"""Reasons that end a response; any other one ("abort") only ends a part of it."""


class HttpRequest(GrowingResponse):
    """A response and what to ask the server for next."""

    def __init__(self, request_id: str, prompt_ids: NDArray[np.int32], params: SampleParams) -> None:
        super().__init__()
        self.group = request_id.partition("/")[0]
        self._prompt, self._params = prompt_ids.tolist(), params

    def prompt(self) -> list[int]:
        """What the next part comes behind."""
        return [*self._prompt, *self.token_ids]

    def sampling(self) -> dict[str, Any]:
        """The fields of a completion request for what is left; every one, as servers have defaults of their own."""
        params, done = self._params, len(self.token_ids)
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
            **({"structured_outputs": structure_arguments(params.structured)} if params.structured else {}),
        }

    def end_part(self) -> None:
        """Where it is not the last: a structure cannot be gone on with in its middle, so the next part begins anew."""
        if self._params.structured and not self.finish_reason:
            self.forget()

    def hear(self, piece: Piece) -> None:
        """What the server said."""
        self.add(piece.token_ids, piece.logprobs)
        if reason := REASONS.get(piece.finish_reason or ""):
            self.finish_reason = reason
        elif len(self.token_ids) >= self._params.max_tokens:
            self.finish_reason = "length"
