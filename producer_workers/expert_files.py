"""Routed experts of finished rollouts as files of their group: for a large model they are megabytes to a rollout."""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np

from buffer.media import MediaFolder
from buffer.rollout import RolloutState, Status

INLINE_BYTES = 64 << 10
"""What is smaller stays a column: a file costs more than it saves."""


def put_experts_into_files(states: Sequence[RolloutState], media: MediaFolder | None, gid: str, token: str) -> None:
    """Those of completed rollouts, where the run has a folder. `token`: of the claim, so that no later one is hit by a
    worker that was only slow. A rollout that goes on keeps its column: its old rows must be there then."""
    if media is None:
        return
    for place, state in enumerate(states):
        experts = state.routed_experts
        if not isinstance(experts, np.ndarray) or experts.nbytes <= INLINE_BYTES:
            continue
        if state.status is Status.COMPLETED:
            file = io.BytesIO()
            np.save(file, experts, allow_pickle=False)
            state.routed_experts = media.put(gid, f"experts-{token}-{place}.npy", file.getbuffer())
