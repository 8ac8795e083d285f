"""What vLLM says of one response, as columns."""

from __future__ import annotations

from typing import Any

import numpy as np

from buffer.rollout import PolicyVersion, VersionSpan
from producer_workers.engines.base import FinishReason, Generation

REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


def generation_of(output: Any, submitted: PolicyVersion) -> Generation:
    """Columns of one CompletionOutput. `submitted`: the version for a vLLM without labels per token."""
    token_ids = np.asarray(output.token_ids, dtype="<i4")
    logprobs = np.asarray(output.logprobs.logprobs if len(token_ids) else (), dtype="<f4")
    labels = getattr(output, "weight_versions", None)
    if labels is None:
        spans = [_span(str(submitted), 0, len(token_ids))]
    else:
        spans = [_span(label.version, label.start, label.end) for label in labels]
    kept = tuple(span for span in spans if span.length)
    return Generation(token_ids, logprobs, kept, REASONS[output.finish_reason])


def _span(label: str, start: int, end: int) -> VersionSpan:
    version = PolicyVersion.parse(label)
    return VersionSpan(start, end - start, version.version, version.lineage)
