"""Whether more is produced for a task and a train step, as producer and trainer see it (I11).

A `TaskStop` tells a waiting trainer why the producer starts nothing more of a task:

    enough   the user's `should_continue_fn` ended the batch: it is complete, up to a train step
    broken   prompts can no longer be drawn: the task is stopped until
             `rolloutmq resume --task TASK`
    failing  every try fails: the scripts count that themselves, and stop the task likewise

A trainer that needs groups of a stopped task waits for that command, or fails (`are_final`).

`ProduceBatchStatus` (XTuner's name) is neither stored nor sent: both sides derive it from the
control state, the train step and the limits, so they cannot disagree.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, cast

from buffer.control.control import ControlState, Mode
from buffer.ids import new_nonce
from buffer.limits import RunLimits
from buffer.readable import shorten_reason
from buffer.redis.keys import Keys
from buffer.redis.scripts import unfenced
from buffer.redis.store import Store
from buffer.wire.staleness import staleness

HaltKind = Literal["", "enough", "broken", "failing"]


@dataclass(frozen=True, slots=True)
class TaskStop:
    """Why the producer starts nothing more of a task, if `kind` is not "".

    `step` is the last train step that "enough" applies to.
    """

    kind: HaltKind = ""
    step: int = 0
    reason: str = ""

    @property
    def is_stopped(self) -> bool:
        return self.kind in ("broken", "failing")

    def describe(self, task: str) -> str:
        return f"task {task} is stopped: {self.reason}"

    def fix(self, task: str) -> str:
        """Return what to do about a stopped task: where its reasons are, and how it continues."""
        resume = f"run `rolloutmq resume --task {task}`"
        if self.kind == "broken":
            return f"fix the cause, then {resume}"
        return (
            "`rolloutmq logs --level warning`, `rolloutmq dead` and `rolloutmq ls --stage skipped` "
            "show why; fix the cause, "
            f"restart the workers if an agent loop or an inline judge was changed, then {resume}"
        )

    def is_enough_for(self, step: int) -> bool:
        """Return whether the groups that are ready now complete the batch of `step`."""
        return self.kind == "enough" and step <= self.step


class TaskStops:
    """Reads and publishes why tasks of a run start no more groups.

    `are_final`: this process raises TaskStopped instead of waiting until a stopped task is resumed
    (`rolloutmq train --exit-when-stuck`).
    """

    are_final = False

    def __init__(self, store: Store, keys: Keys) -> None:
        self._store = store
        self._keys = keys

    def of(self, task: str) -> TaskStop:
        """Return the halt of a task; `TaskStop()` without one."""
        names = ("halt", "halt_step", "halt_reason", "stopped")
        command = ("HMGET", self._keys.progress(task), *names)
        (fields,) = self._store.send("halt", [command])
        kind, step, reason, stopped = (field.decode() if field else "" for field in fields)
        if stopped:
            return TaskStop("failing", 0, stopped)
        return TaskStop(cast(HaltKind, kind), int(step or 0), reason)

    def publish(self, nonce: str, task: str, halt: TaskStop) -> None:
        """Publish as producer `nonce` why a task stopped; `TaskStop()` ends it. Raises Fenced."""
        reply = self._store.call(
            "halt",
            self._keys.slots(task=task),
            {
                "operation": new_nonce(),
                "nonce": nonce,
                "task": task,
                "kind": halt.kind,
                "step": halt.step,
                "reason": shorten_reason(halt.reason),
            },
        )
        unfenced(reply, "producer")


class ProduceBatchStatus(StrEnum):
    """The status of production for a train step: the first that applies, in this order."""

    FINISH = "finish"  # the run is over; nothing more is produced
    UPDATE_WEIGHT_AND_ABORT = "update_weight_and_abort"
    """training lanes are closed, for new weights or by the operator; nothing is started"""
    EXPIRED_BATCH = "expired_batch"
    """the newest weights are too old for the step; production continues with newer ones"""
    NORMAL = "normal"


def batch_status(state: ControlState, step: int, limits: RunLimits) -> ProduceBatchStatus:
    """Return the status for `step`: the next to produce (producer) or to take (trainer)."""
    if state.mode is Mode.FINISH:
        return ProduceBatchStatus.FINISH
    if "fresh" not in state.lanes:
        return ProduceBatchStatus.UPDATE_WEIGHT_AND_ABORT
    if staleness(step, state.weights.version) >= limits.horizon_of(step):
        return ProduceBatchStatus.EXPIRED_BATCH
    return ProduceBatchStatus.NORMAL
