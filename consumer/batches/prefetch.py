"""Payloads of the next batch, read while the present one trains.

Nothing is taken early: a batch that is taken before the weights are published that it could have
had is one step older than it must be. So this only looks (`peek`) at the groups that would be taken
now, and reads their bytes. What the take then names is used; another group, or another token of
one, is read as ever. Bytes never change under a token, so that a batch is the same whether or not
they were here (I5).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping

from buffer.errors import RolloutMQError
from buffer.model.group import RolloutGroup
from buffer.model.job import PayloadRef
from buffer.run import Run

log = logging.getLogger("rolloutmq.consumer")

LOOK_S = 0.2
"""Between two looks at what is ready."""

AT_ONCE = 16
"""Groups in one read: the trainer, when it takes, waits at most for that many."""


class Prefetcher:
    """Holds at most `budget_bytes` of payloads; 0: does nothing at all. Ends with `closed`."""

    def __init__(self, run: Run, budget_bytes: int, closed: threading.Event) -> None:
        self._run = run
        self._budget = budget_bytes
        self._closed = closed
        self._held: dict[PayloadRef, RolloutGroup] = {}
        self._lock = threading.Lock()
        self._counts: Mapping[str, int] = {}
        self._go = threading.Event()
        self._thread: threading.Thread | None = None
        self.used = self.read = 0
        """groups that a batch found here, and that were read ahead, in all"""

    @property
    def held_bytes(self) -> int:
        with self._lock:
            return sum(ref.size for ref in self._held)

    def begin(self, counts: Mapping[str, int]) -> None:
        """Look ahead for a batch like this one, until `end`."""
        if not self._budget or self._closed.is_set():
            return
        self._counts = dict(counts)
        self._go.set()
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._look_on, name="trainer-prefetch", daemon=True
            )
            self._thread.start()

    def end(self) -> None:
        """The trainer takes now. Does not wait for a read that is under way."""
        self._go.clear()

    def hand_out(self, refs: list[PayloadRef]) -> dict[PayloadRef, RolloutGroup]:
        """What is here of a batch. All else is forgotten: its turn had come."""
        with self._lock:
            held = self._held
            self._held = {}
        found = {ref: held[ref] for ref in refs if ref in held}
        self.used += len(found)
        return found

    def close(self) -> None:
        self._closed.set()
        self._go.set()
        if self._thread is not None:
            self._thread.join()

    def _look_on(self) -> None:
        while self._go.wait() and not self._closed.is_set():
            try:
                self._look()
            except (
                RolloutMQError
            ) as error:  # also of a group that has left meanwhile: the trainer meets what is true
                log.debug("not prefetched: %s", error)
            self._closed.wait(LOOK_S)

    def _look(self) -> None:
        asked = {task: count for task, count in self._counts.items() if count > 0}
        wanted = [
            entry.payload
            for task, count in asked.items()
            for entry in self._run.buffer.peek(count, task)
        ]
        for refs in self._missing(wanted):
            groups = self._run.buffer.read_many(refs)
            with self._lock:
                if not self._go.is_set():
                    return
                self._held.update(zip(refs, groups, strict=True))
            self.read += len(refs)

    def _missing(self, wanted: list[PayloadRef]) -> list[list[PayloadRef]]:
        """What to read of it, in slices; what nobody wants any more is forgotten first."""
        with self._lock:
            if not self._go.is_set():
                return []  # the trainer takes: what it has taken is wanted by no one else, and must not be forgotten
            self._held = {ref: self._held[ref] for ref in wanted if ref in self._held}
            held = set(self._held)
        room, missing = self._budget - sum(ref.size for ref in held), []
        for ref in wanted:
            if ref not in held and ref.size <= room:
                room -= ref.size
                missing.append(ref)
        return [missing[i : i + AT_ONCE] for i in range(0, len(missing), AT_ONCE)]
