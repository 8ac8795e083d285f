"""Payloads of the next batch, read while the current one trains.

The prefetcher peeks at the groups that a take would return now, and takes nothing: a batch that is
taken before the newest weights are published is one step too old. Bytes never change under a token,
so a batch is the same with and without prefetching (I5).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping

from buffer.errors import RolloutMQError
from buffer.job import PayloadRef
from buffer.run.run import Run
from buffer.wire.group import RolloutGroup

log = logging.getLogger("rolloutmq.consumer")

POLL_S = 0.2  # seconds between two peeks

READ_SIZE = 16  # groups in one read, for which a take may have to wait


class Prefetcher:
    """Reads ahead at most `budget_bytes` of payloads (0: none), until `closed` is set."""

    def __init__(self, run: Run, budget_bytes: int, closed: threading.Event) -> None:
        self._run = run
        self._budget = budget_bytes
        self._closed = closed
        self._held: dict[PayloadRef, RolloutGroup] = {}
        self._lock = threading.Lock()
        self._counts: Mapping[str, int] = {}
        self._is_active = threading.Event()
        self._thread: threading.Thread | None = None
        self.used = 0  # groups read ahead that a batch contained
        self.read = 0

    @property
    def held_bytes(self) -> int:
        with self._lock:
            return sum(ref.size for ref in self._held)

    def begin(self, counts: Mapping[str, int]) -> None:
        if not self._budget:
            return
        # `close` may be called from another thread: nothing starts after it
        with self._lock:
            if self._closed.is_set():
                return
            self._counts = dict(counts)
            self._is_active.set()
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._read_ahead, name="trainer-prefetch", daemon=True
                )
                self._thread.start()

    def end(self) -> None:
        """Stop reading before a take. Does not wait for a read in progress."""
        self._is_active.clear()

    def pop(self, refs: list[PayloadRef]) -> dict[PayloadRef, RolloutGroup]:
        with self._lock:
            held = self._held
            self._held = {}
        found = {ref: held[ref] for ref in refs if ref in held}
        self.used += len(found)
        return found

    def close(self) -> None:
        with self._lock:
            self._closed.set()
            self._is_active.set()
            thread = self._thread
        if thread:
            thread.join()

    def _read_ahead(self) -> None:
        while self._is_active.wait() and not self._closed.is_set():
            try:
                self._read_ready()
            except RolloutMQError as error:
                # a group may have left the pool; the take reports errors that matter
                log.debug("not prefetched: %s", error)
            self._closed.wait(POLL_S)

    def _read_ready(self) -> None:
        asked = {task: count for task, count in self._counts.items() if count > 0}
        wanted = [
            entry.payload
            for task, count in asked.items()
            for entry in self._run.buffer.peek(count, task)
        ]
        for refs in self._missing(wanted):
            groups = self._run.buffer.read_many(refs)
            with self._lock:
                if not self._is_active.is_set():
                    return
                self._held.update(zip(refs, groups, strict=True))
            self.read += len(refs)

    def _missing(self, wanted: list[PayloadRef]) -> list[list[PayloadRef]]:
        """Return what to read, in slices, after forgetting groups that are not wanted any more."""
        with self._lock:
            if not self._is_active.is_set():
                # the trainer takes: groups that it has taken are not ready, but it will pop them
                return []
            self._held = {ref: self._held[ref] for ref in wanted if ref in self._held}
            held = set(self._held)
        room = self._budget - sum(ref.size for ref in held)
        missing = []
        for ref in wanted:
            if ref not in held and ref.size <= room:
                room -= ref.size
                missing.append(ref)
        return [missing[i : i + READ_SIZE] for i in range(0, len(missing), READ_SIZE)]
