"""Tasks of which the producer starts nothing more, and why: what a trainer that waits for them must
know (I11).

    enough   the user's `should_continue_fn` said so: the batch is what there is, up to a train step
    broken   prompts cannot be drawn any more: the task is stopped until `rolloutmq continue --task`

Too many failures in a row are counted by the scripts themselves (`JobQueue.failures`).

How the production of a batch stands (XTuner's `ProduceBatchStatus`), as producer and trainer both
see it.

Nobody stores or sends it: it follows from the control state, the train step that is asked about,
and the limits, so the two sides cannot disagree about what they both can read.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, cast

from buffer.control.control import ControlState, Mode
from buffer.model.limits import RunLimits
from buffer.model.staleness import staleness
from buffer.store.keys import Keys
from buffer.store.replies import unfenced
from buffer.store.store import Store

HaltKind = Literal["", "enough", "broken"]


@dataclass(frozen=True, slots=True)
class Halt:
    """`kind` "" is no halt; `step` is the last train step that "enough" is about."""

    kind: HaltKind = ""
    step: int = 0
    reason: str = ""
    failures: int = 0
    """tries that failed or were filtered one after the other, when it was read"""

    def is_enough_for(self, step: int) -> bool:
        return self.kind == "enough" and step <= self.step


class Halts:
    """The halts of one run."""

    def __init__(self, store: Store, keys: Keys) -> None:
        self._store = store
        self._keys = keys

    def of(self, task: str) -> Halt:
        (fields,) = self._store.each(
            "halt",
            [
                (
                    "HMGET",
                    self._keys.progress(task),
                    "halt",
                    "halt_step",
                    "halt_reason",
                    "failures_in_row",
                )
            ],
            "control",
        )
        kind, step, reason, failures = (field.decode() if field else "" for field in fields)
        return Halt(cast(HaltKind, kind), int(step or 0), reason, int(failures or 0))

    def say(self, nonce: str, task: str, halt: Halt) -> None:
        """Say it for the producer `nonce`; `Halt()` takes it back. Raises Fenced."""
        text = halt.reason.encode(errors="replace")[:2000].decode(errors="ignore")
        reply = self._store.call(
            "halt",
            self._keys.slots(task=task),
            {"nonce": nonce, "task": task, "kind": halt.kind, "step": halt.step, "reason": text},
        )
        unfenced(reply, "producer")


class ProduceBatchStatus(StrEnum):
    """Values of a round of production, and of a batch that is awaited; the first that holds, in
    this order.
    """

    FINISH = "finish"
    """the run is over: nothing more is produced"""
    UPDATE_WEIGHT_AND_ABORT = "update_weight_and_abort"
    """training lanes are closed, for new weights or by the operator: nothing is started"""
    EXPIRED_BATCH = "expired_batch"
    """the newest weights are too old for the step: only newer ones go on"""
    NORMAL = "normal"


def batch_status(state: ControlState, step: int, limits: RunLimits) -> ProduceBatchStatus:
    """How production for train step `step` stands under a control state. The producer asks about
    the step that it would produce next, the trainer about the one that it is to take.
    """
    if state.mode is Mode.FINISH:
        return ProduceBatchStatus.FINISH
    if "fresh" not in state.lanes:
        return ProduceBatchStatus.UPDATE_WEIGHT_AND_ABORT
    if staleness(step, state.weights.version) >= limits.horizon:
        return ProduceBatchStatus.EXPIRED_BATCH
    return ProduceBatchStatus.NORMAL
