"""What a judge in another process, or on another machine, is told of a rollout."""

from __future__ import annotations

from typing import Any

from buffer.rollout import RolloutState


def rollout_fields(state: RolloutState) -> dict[str, Any]:
    """Its texts, not its token columns; plain JSON where the data set is."""
    return {
        "response": state.response,
        "ground_truth": state.ground_truth,
        "data_source": state.data_source,
        "messages": state.messages,
        "extra": state.extra,
    }
