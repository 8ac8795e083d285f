"""How the production of a batch stands (XTuner's `ProduceBatchStatus`), as producer and trainer both see it.

Nobody stores or sends it: it follows from the control state, the train step that is asked about, and the limits, so the
two sides cannot disagree about what they both can read.
"""

from __future__ import annotations

from enum import StrEnum

from buffer.control import ControlState, Mode
from buffer.limits import RunLimits
from buffer.staleness import staleness


class ProduceBatchStatus(StrEnum):
    """Values of a round of production, and of a batch that is awaited; the first that holds, in this order."""

    FINISH = "finish"
    """the run is over: nothing more is produced"""
    UPDATE_WEIGHT_AND_ABORT = "update_weight_and_abort"
    """training lanes are closed, for new weights or by the operator: nothing is started"""
    EXPIRED_BATCH = "expired_batch"
    """the newest weights are too old for the step: only newer ones go on"""
    NORMAL = "normal"


def batch_status(state: ControlState, step: int, limits: RunLimits) -> ProduceBatchStatus:
    """How production for train step `step` stands under a control state. The producer asks about the step that it would
    produce next, the trainer about the one that it is to take."""
    if state.mode is Mode.FINISH:
        return ProduceBatchStatus.FINISH
    if "fresh" not in state.lanes:
        return ProduceBatchStatus.UPDATE_WEIGHT_AND_ABORT
    if staleness(step, state.weights.version) >= limits.horizon:
        return ProduceBatchStatus.EXPIRED_BATCH
    return ProduceBatchStatus.NORMAL
