"""Read the groups of a taken batch, some of them ahead; find out which of them cannot be used.

While a batch is trained, the prefetcher peeks at the groups that a take would return now, and takes
nothing: a batch that is taken before the newest weights are published is one step too old. Bytes
never change under a token, so a batch is the same with and without prefetching (I5).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from functools import partial

import numpy as np

from buffer.errors import PayloadMissing, RolloutMQError, WireError
from buffer.job import PayloadRef
from buffer.manifest import Manifest
from buffer.run.run import Run
from buffer.wire.document import ids_of
from buffer.wire.group import RolloutGroup

log = logging.getLogger("rolloutmq.consumer")

LOWEST_LOGPROB = -50.0  # float32 samplers stay above about -25; workers use -9999 or so for "none"

HIGHEST_LOGPROB = 0.01  # 0 plus rounding: finds probabilities in place of logprobs


def check_content(group: RolloutGroup, vocabulary: int | None) -> None:
    """Raise WireError where a group cannot be trained, with the first wrong token.

    An id without an embedding ends the process; an impossible logprob gives a gradient that drowns
    all others. `vocabulary`: number of token ids; None: ids are not compared with it. Only logprobs
    of trained tokens (mask 1) are checked.
    """
    bounds = group.bounds
    largest = 2**31 - 1 if vocabulary is None else vocabulary - 1
    for name in ids_of(group.columns) if bounds.largest_id > largest else ():
        ids = group.columns[name]
        # as unsigned numbers, negative ids are beyond any vocabulary
        wrong = ids.view(np.uint32) > largest
        if wrong.any():
            position = int(wrong.argmax())
            raise WireError(
                f"the token id {int(ids.flat[position])} in {name}, at {position}, is not in the "
                f"model's vocabulary of {largest + 1}",
                hint="let workers and trainer use the same model and tokenizer",
            )
    if bounds.lowest_logprob >= LOWEST_LOGPROB and bounds.highest_logprob <= HIGHEST_LOGPROB:
        return
    logprobs = group.logprobs
    # nan compares as False
    is_plausible = (logprobs >= LOWEST_LOGPROB) & (logprobs <= HIGHEST_LOGPROB)
    wrong = ~is_plausible & (group.mask > 0)
    if wrong.any():
        position = int(wrong.argmax())
        raise WireError(
            f"the logprob {float(logprobs[position]):g} of trained token {position} is outside of "
            f"{LOWEST_LOGPROB:g} to 0",
            hint="submit the natural log of the probability with which each token was sampled, "
            "and mask 0 for tokens that were not sampled",
        )


Known = Mapping[PayloadRef, RolloutGroup]  # groups that were read ahead

NOTHING: Known = {}

Problems = dict[str, str]  # why groups cannot be used, by gid


class BatchReader:
    """Reads all groups of a batch; `trains`: also finds untrainable ones (`check_content`)."""

    def __init__(self, run: Run, *, trains: bool = True) -> None:
        self._buffer = run.buffer
        self._trains = trains
        self.vocabulary: int | None = None  # token ids of the model; None: ids are not compared

    def read(
        self, manifest: Manifest, known: Known = NOTHING
    ) -> tuple[list[RolloutGroup], Problems]:
        """Return the groups, or why some are unusable and to be replaced.

        Groups in `known` are not read.
        """
        if not manifest.entries:
            return [], {}
        try:
            groups = self._buffer.load(manifest, known)
        except (WireError, PayloadMissing):
            problems = _collect(
                (entry.gid, partial(self._buffer.read, entry.payload)) for entry in manifest.entries
            )
            if problems:
                return [], problems
            # it was read ahead
            groups = self._buffer.load(manifest)
        checked = groups if self._trains else []
        return groups, _collect(
            (group.gid, partial(check_content, group, self.vocabulary)) for group in checked
        )


def _collect(checks: Iterable[tuple[str, Callable[[], object]]]) -> Problems:
    """Return by gid what the checks of groups raise."""
    problems = {}
    for gid, check in checks:
        try:
            check()
        except (WireError, PayloadMissing) as error:
            problems[gid] = f"{type(error).__name__}: {error}"
    return problems


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
                wanted = [
                    entry.payload
                    for task, count in self._counts.items()
                    for entry in (self._run.buffer.peek(count, task) if count > 0 else ())
                ]
                for refs in self._missing(wanted):
                    groups = self._run.buffer.read_many(refs)
                    with self._lock:
                        if not self._is_active.is_set():
                            break
                        self._held.update(zip(refs, groups, strict=True))
                    self.read += len(refs)
            except RolloutMQError as error:
                # a group may have left the pool; the take reports errors that matter
                log.debug("not prefetched: %s", error)
            self._closed.wait(POLL_S)

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
