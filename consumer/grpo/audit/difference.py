"""The difference between the logprobs of a group and those of the weights that its tokens name.

Measured with honest engines on a CPU (tiny Qwen3 models, 24 groups of one rollout, 4,400 tokens),
in nats. The worst groups have a few tokens only.

engine                   trainer    rms      worst group   worst token
vLLM, float32            float32    2e-6     3e-6          1e-5
vLLM, float32            bfloat16   0.038    0.044         0.24
vLLM, bfloat16           float32    0.040    0.057         0.27
vLLM, bfloat16           bfloat16   0.046    0.058         0.30
transformers, float32    float32    3e-6     4e-6          1e-5
transformers, float32    bfloat16   0.039    0.150         0.21
transformers, bfloat16   bfloat16   0.049    0.096         0.25
other weights            float32    > 3.9

[audit] tolerance is five times the rms in bfloat16 by default; in float32, 0.01 is enough.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from buffer.errors import WireError
from buffer.ids import NAME
from buffer.wire.group import RolloutGroup
from buffer.wire.rollout import PolicyVersion
from consumer.grpo.learner.learner import Learner
from consumer.handle.reader import check_content

MOST_VERSIONS = 32  # of an audited group: each may have to be loaded


@dataclass(frozen=True, slots=True)
class Difference:
    tokens: int = 0
    squares: float = 0.0

    @property
    def rms(self) -> float:
        """Return the root mean square, in nats."""
        return math.sqrt(self.squares / max(1, self.tokens))

    def __add__(self, other: Difference) -> Difference:
        return Difference(self.tokens + other.tokens, self.squares + other.squares)


NOTHING = Difference()


def versions_of(group: RolloutGroup) -> set[PolicyVersion]:
    return {weights for weights, _ in _parts(group)}


def check_auditable(group: RolloutGroup) -> None:
    """Raise WireError if the group's trained tokens cannot be computed again."""
    if group.multimodal:
        raise WireError("it has images, which an audit does not read")
    versions = versions_of(group)
    if len(versions) > MOST_VERSIONS:
        raise WireError(f"its tokens name {len(versions)} versions of weights")
    if not all(NAME.fullmatch(weights.lineage) for weights in versions):
        raise WireError("its tokens name weights that no trainer can have published")
    has_version = np.zeros(len(group.mask), np.bool_)
    for _, part in _parts(group):
        has_version[part] = True
    if (~has_version & (group.mask > 0)).any():
        raise WireError("it has trained tokens that name no weights")


def compare(learner: Learner, weights: PolicyVersion, group: RolloutGroup) -> Difference:
    """Compare the tokens that name `weights` with the learner's model. Raises WireError."""
    check_content(group, learner.vocabulary)
    computed = _logprobs(learner, group)
    parts = [part for own, part in _parts(group) if own == weights]
    found = np.concatenate([group.logprobs[part] - computed[part] for part in parts])
    return Difference(len(found), float(np.square(found, dtype=np.float64).sum()))


def _logprobs(learner: Learner, group: RolloutGroup) -> NDArray[np.float32]:
    """Return the logprobs of all response tokens, float32[R]."""
    starts = np.cumsum(group.lengths) - group.lengths
    found = np.zeros(len(group.logprobs), np.float32)
    (update,) = learner.pack([group]).updates
    for batch in update.batches:
        values = learner.logprobs(batch).float().cpu().numpy()
        for rollout in batch.rollout.tolist():
            start, length = int(starts[rollout]), int(group.lengths[rollout])
            found[start : start + length] = values[:length]
            values = values[length:]
    return found


def _parts(group: RolloutGroup) -> Iterator[tuple[PolicyVersion, slice]]:
    """Yield the weights of each span, and its part of the token columns."""
    starts = np.cumsum(group.lengths) - group.lengths
    for start, spans in zip(starts.tolist(), group.spans(), strict=True):
        for span in spans:
            first = start + span.start
            if span.length:
                yield PolicyVersion(span.lineage, span.version), slice(first, first + span.length)
