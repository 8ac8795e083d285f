"""PipelineRL's way, to repeat the comparison: `pipelinerl/streams.py` in a few lines.

It pickles a group as Python objects with lists of numbers, adds it to a stream, and reads entry
after entry.
"""

from __future__ import annotations

# Only here, to measure what others do; a pickle from a stranger runs the stranger's code.
import pickle
from typing import Any

import numpy as np

from buffer.wire.group import RolloutGroup

NAME = "PipelineRL's stream"
_KEY = "pipelinerl"

Rollouts = list[dict[str, Any]]


def as_lists(group: RolloutGroup) -> Rollouts:
    """Return a group as most trainers hold it: a dict with lists of numbers per rollout."""
    return [
        {
            "gid": group.gid,
            "input_ids": [*group.prompt_ids.tolist(), *state.response_ids.tolist()],
            "logprobs": state.logprobs.tolist(),
            "mask": state.response_mask.tolist() if state.response_mask is not None else None,
            "reward": state.reward,
            "text": state.response,
        }
        for state in group.states
    ]


def add(client: Any, groups: list[Rollouts]) -> None:
    """Add groups one by one."""
    for index, rollouts in enumerate(groups):
        fields = {"index": index, "data": pickle.dumps(rollouts)}
        client.xadd(_KEY, fields, maxlen=1_000_000, approximate=True)


def read(client: Any, count: int, last: bytes = b"0") -> tuple[bytes, list[Rollouts]]:
    """Return `count` groups behind the entry `last`, with arrays as packing needs them.

    The first value is the id of the last entry that was read.
    """
    names = ("input_ids", "logprobs", "mask")
    groups = []
    for _ in range(count):
        [[_, [[last, fields]]]] = client.xread({_KEY: last}, count=1)
        rollouts: Rollouts = pickle.loads(fields[b"data"])
        groups.append([one | {name: np.array(one[name]) for name in names} for one in rollouts])
    return last, groups


def forget(client: Any) -> None:
    """Remove all entries."""
    client.xtrim(_KEY, maxlen=0)
