"""What vLLM says of one response, as columns."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from buffer.rollout import PolicyVersion, VersionSpan, expert_rows
from producer_workers.engines.base import FinishReason, Generation, GenerationError

REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


def generation_of(output: Any, submitted: PolicyVersion, prompt: int) -> Generation:
    """Columns of one CompletionOutput behind `prompt` tokens. `submitted`: the version for a vLLM without labels per
    token."""
    token_ids = np.asarray(output.token_ids, dtype="<i4")
    logprobs = np.asarray(output.logprobs.logprobs if len(token_ids) else (), dtype="<f4")
    labels = getattr(output, "weight_versions", None)
    if labels is None:
        spans = [_span(str(submitted), 0, len(token_ids))]
    else:
        spans = [_span(label.version, label.start, label.end) for label in labels]
    kept = tuple(span for span in spans if span.length)
    return Generation(token_ids, logprobs, kept, REASONS[output.finish_reason], _experts_of(output, prompt))


def _experts_of(output: Any, prompt: int) -> NDArray[np.int16] | None:
    """None where vLLM tells nothing, or made no token. Its rows are uint8 or uint16[P + n - 1, layers, top_k]."""
    tokens, given = len(output.token_ids), getattr(output, "routed_experts", None)
    if given is None or not tokens:
        return None
    if len(given) != expert_rows(prompt, tokens):
        raise GenerationError(f"vLLM told the experts of {len(given)} tokens of {prompt} and {tokens} after them")
    return np.asarray(given, "<i2")


def _span(label: str, start: int, end: int) -> VersionSpan:
    version = PolicyVersion.parse(label)
    return VersionSpan(start, end - start, version.version, version.lineage)
