"""Collect a response while it grows: its tokens, and which weights made which of them."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from buffer.wire.rollout import PolicyVersion, VersionSpan
from producer_workers.engines.base import FinishReason, Generation


class GrowingResponse:
    """The response of one request so far. `finish_reason` is None until it has ended."""

    def __init__(self) -> None:
        self.finish_reason: FinishReason | None = None
        self.forget()

    def forget(self) -> None:
        """Drop all tokens and start again."""
        self.token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._spans: list[VersionSpan] = []

    def add(self, token_ids: Iterable[int], logprobs: Iterable[float]) -> None:
        """Append tokens with their logprobs."""
        self.token_ids.extend(token_ids)
        self._logprobs.extend(logprobs)

    def stamp(self, version: PolicyVersion) -> None:
        """Record that `version` made the tokens since the last stamp; extend its span if it can."""
        start = self._spans[-1].start + self._spans[-1].length if self._spans else 0
        if start == len(self.token_ids):
            return
        if self._spans and (self._spans[-1].lineage, self._spans[-1].version) == version:
            start = self._spans.pop().start
        length = len(self.token_ids) - start
        self._spans.append(VersionSpan(start, length, version.version, version.lineage))

    def finish(self, reason: FinishReason) -> None:
        """End the response for `reason`, unless it has ended."""
        self.finish_reason = self.finish_reason or reason

    def generation(self) -> Generation:
        """Return the whole response, which must have ended."""
        assert self.finish_reason is not None
        token_ids = np.asarray(self.token_ids, dtype="<i4")
        logprobs = np.asarray(self._logprobs, dtype="<f4")
        return Generation(
            token_ids, logprobs, tuple(self._spans), self.finish_reason, self.routed_experts()
        )

    def routed_experts(self) -> NDArray[np.int16] | None:
        """Return the experts, as in `Generation`; None where they are not recorded."""
        return None
