"""Overlong reward shaping: a response close to its token limit loses score, softly at first.

(DAPO, Yu et al. 2025, arXiv:2503.14476, equation 13.) It replaces a hard cut, which punishes
correct reasoning at random because of its length.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from buffer.group import RolloutGroup
from buffer.rollout import SampleParams


def overlong_penalty(
    lengths: NDArray[np.int32], max_tokens: NDArray[np.int32], buffer_tokens: int
) -> NDArray[np.float32]:
    """Return what to add to the scores, float32[k], in [-1, 0].

    `lengths`, `max_tokens`: int32[k], of each response. The penalty is 0 up to
    `max_tokens - buffer_tokens`, falls linearly to -1 at `max_tokens`, and is -1 above.
    """
    over = np.asarray(lengths, np.float64) - (np.asarray(max_tokens, np.float64) - buffer_tokens)
    return (-np.clip(over / buffer_tokens, 0.0, 1.0)).astype(np.float32)


def shaped_scores(group: RolloutGroup, buffer_tokens: int | None) -> NDArray[np.float32]:
    """Return the group's scores with the penalty of its lengths, float32[k].

    Without `buffer_tokens` the scores are unchanged.
    """
    if buffer_tokens is None:
        return group.scores
    default = SampleParams().max_tokens
    limits = [member["sample"].get("max_tokens", default) for member in group.members]
    return group.scores + overlong_penalty(group.lengths, np.array(limits, "<i4"), buffer_tokens)
