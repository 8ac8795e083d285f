"""Tasks of which the producer starts nothing more, and why: what a trainer that waits for them must know (I11).

    enough   the user's `should_continue_fn` said so: the batch is what there is, up to a train step
    broken   prompts cannot be drawn any more: the task is stopped until `rolloutmq continue --task`

Too many failures in a row are counted by the scripts themselves (`JobQueue.failures`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast

from buffer.control import unfenced
from buffer.keys import Keys
from buffer.store import Store

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
        self._store, self._keys = store, keys

    def of(self, task: str) -> Halt:
        (fields,) = self._store.each(
            "halt",
            [("HMGET", self._keys.progress(task), "halt", "halt_step", "halt_reason", "failures_in_row")],
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
