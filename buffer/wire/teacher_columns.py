"""The columns that teachers add to a group: logprobs of its tokens, and their own top tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from buffer.wire.document import Columns, Head


def tops_of(head: Head, columns: Columns) -> dict[str, tuple[NDArray[Any], NDArray[Any]]]:
    """Return the top tokens of each teacher with any: ids and logprobs, [R, k]."""
    if not head.teacher_top_k:
        return {}
    ends = np.cumsum(head.teacher_top_k).tolist()
    parts = zip(head.teachers, head.teacher_top_k, ends, strict=True)
    blocks = ((name, slice(end - k, end)) for name, k, end in parts if k)
    return {
        name: (columns["teacher_top_ids"][:, block], columns["teacher_top_logprobs"][:, block])
        for name, block in blocks
    }


def own_tops(
    tops: Mapping[str, tuple[NDArray[Any], NDArray[Any]]], part: slice
) -> dict[str, dict[str, NDArray[Any]]]:
    """Return the fields of a rollout, whose tokens are `part` of the group's."""
    own = {
        name: (ids[part], logprobs[part])
        for name, (ids, logprobs) in tops.items()
        if part.start < part.stop and not np.isnan(logprobs[part.start, 0])
    }
    if not own:
        return {}
    return {
        "teacher_top_ids": {name: ids for name, (ids, _) in own.items()},
        "teacher_top_logprobs": {name: logprobs for name, (_, logprobs) in own.items()},
    }
