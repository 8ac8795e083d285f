"""Move the routed experts of a group out of its payload: of a large model they are megabytes."""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np

from buffer.redis.media_folder import MediaFolder
from buffer.rollouts.rollout import RolloutState, Status

INLINE_BYTES = 64 << 10
"""Routed experts of at most this size stay in their column: a file costs more than it saves."""


def put_experts_into_files(
    states: Sequence[RolloutState], media: MediaFolder | None, gid: str, token: str
) -> None:
    """Move the routed experts of completed rollouts into the run's media folder, if it has one.

    For a large model they are megabytes per rollout. `token`: of the claim, so that a slow worker
    cannot overwrite the files of a later one.
    """
    if media is None:
        return
    for position, state in enumerate(states):
        experts = state.routed_experts
        if not isinstance(experts, np.ndarray) or experts.nbytes <= INLINE_BYTES:
            continue
        # an interrupted rollout keeps its column: the next worker needs its rows
        if state.status is Status.COMPLETED:
            file = io.BytesIO()
            np.save(file, experts, allow_pickle=False)
            name = f"experts-{token}-{position}.npy"
            state.routed_experts = media.put(gid, name, file.getbuffer())
