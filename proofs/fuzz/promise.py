"""What `group_bytes.decode` promises for any bytes: a WireError, or a group that can be used and written
again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from buffer.errors import WireError
from buffer.wire import group_bytes
from buffer.wire.group import RolloutGroup
from buffer.wire.rollout import RolloutState
from buffer.wire.sampling_mask import SamplingMask

GOLDEN = Path(__file__).parents[2] / "tests" / "buffer" / "golden"


def plain(state: RolloutState) -> dict[str, Any]:
    """A state as comparable values; a mask of all ones is the same as none, and so is a column
    without tokens.
    """
    fields = dict(state)
    mask = fields.pop("response_mask")
    for name in ("ref_logprobs", "values", "token_rewards"):
        fields[name] = None if fields[name] is None else fields[name].tolist() or None
    teachers = fields["teacher_logprobs"] or {}
    # the wire writes them in the order of their names
    fields["teacher_logprobs"] = {
        n: teachers[n].tolist() for n in sorted(teachers) if len(teachers[n])
    }
    for name in ("teacher_top_ids", "teacher_top_logprobs"):
        tops = fields[name] or {}
        fields[name] = {n: tops[n].tolist() for n in sorted(tops) if len(tops[n])}
    fields["reward"] = fields["reward"] or None
    if isinstance(state.routed_experts, np.ndarray):
        fields["routed_experts"] = state.routed_experts.tolist()
    if isinstance(state.sampling_mask, SamplingMask):
        fields["sampling_mask"] = [
            state.sampling_mask.counts.tolist(),
            state.sampling_mask.ids.tolist(),
        ]
    columns = {
        name: fields.pop(name).tolist() for name in ("prompt_ids", "response_ids", "logprobs")
    }
    return fields | columns | {"mask": None if mask is None or all(mask) else mask.tolist()}


def keep(data: bytes) -> bool:
    """Whether the bytes were accepted. Raises whatever breaks the promise."""
    try:
        group = group_bytes.decode(data)
    except WireError as error:
        if len(str(error)) > 2000:
            raise AssertionError("an error is read by people") from error
        return False
    assert len(group.states) == len(group)
    assert group.scores.shape == (len(group),)
    again = RolloutGroup(group.gid, group.task, group.states)
    assert repr([plain(s) for s in group_bytes.decode(group_bytes.encode(again)).states]) == repr(
        [plain(s) for s in group.states]
    )
    return True
