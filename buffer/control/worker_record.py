"""What a worker reports with its heartbeats, and the record that the server keeps of it.

A number is a field of `HeartbeatNumbers`, an argument of `lua/heartbeat.lua`, and a value that
`producer_workers/worker/heartbeat.py` fills in. A worker of another language may write anything
into its record: an invalid number counts as not written, and texts are kept as they are.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from itertools import accumulate
from typing import Any

from buffer.readable import shorten_reason
from buffer.wire.rollout import PolicyVersion

JUDGE_BOUNDS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Upper bounds of the times that judges take."""

PAUSE_BOUNDS_S = (0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0, 30.0, 300.0)
"""Upper bounds of the times from a trainer's `pause()` to the last receipt."""


class Histogram:
    """Counts durations by upper bound, in constant size. One thread adds; others may read.

    Counts of several workers can be added up, unlike quantiles. Counts of another length are
    ignored: after a change of the bounds, restart all processes of a run.
    """

    def __init__(
        self, bounds_s: Sequence[float], counts: Sequence[int] = (), total_s: float = 0.0
    ) -> None:
        self._bounds_s = bounds_s
        # one more bucket for what is longer than the last bound
        is_known = len(counts) == len(bounds_s) + 1
        self._counts = list(counts) if is_known else [0] * (len(bounds_s) + 1)
        self.total_s = total_s if is_known else 0.0

    def add(self, seconds: float) -> None:
        self._counts[bisect_left(self._bounds_s, seconds)] += 1
        self.total_s += seconds

    @property
    def counts(self) -> tuple[int, ...]:
        """The durations in each bucket, not added up; the last one has no upper bound."""
        return tuple(self._counts)

    @property
    def count(self) -> int:
        return sum(self._counts)

    def at_most(self) -> dict[float, int]:
        """Return how many durations were within each bound, as Prometheus counts them."""
        return dict(zip(self._bounds_s, accumulate(self._counts), strict=False))

    def quantile_s(self, share: float) -> float:
        """Return the `share` quantile, interpolated as Prometheus does; 0 without durations."""
        counts = self.counts
        rank = share * sum(counts)
        below = 0
        lower_s = 0.0
        for upper_s, count in zip(self._bounds_s, counts, strict=False):
            if count and below + count >= rank:
                return lower_s + (upper_s - lower_s) * (rank - below) / count
            below += count
            lower_s = upper_s
        return lower_s if sum(counts) else 0.0


def join_counts(counts: Sequence[int]) -> str:
    return " ".join(map(str, counts))


def parse_counts(text: str) -> tuple[int, ...] | None:
    """Return the counts in a text; None if it contains anything but whole numbers."""
    words = text.split()
    is_whole = all(word.isascii() and word.isdigit() and len(word) <= 15 for word in words)
    return tuple(map(int, words)) if is_whole else None


class WorkerState(StrEnum):
    """States that workers of this project report; one in another language may report any word."""

    STARTING = "starting"  # registered, and no heartbeat yet
    IDLE = "idle"  # holds no group and may claim
    WORKING = "working"
    PAUSED = "paused"
    DRAINING = "draining"  # finishes what it holds, then leaves
    LEFT = "left"  # only in the records of `Fleet.ended`: it deregistered
    LOST = "lost"  # as LEFT, but it fell silent


@dataclass(frozen=True, slots=True, kw_only=True)
class HeartbeatNumbers:
    """The numbers of a heartbeat. Counts without another remark are since the worker started."""

    tokens_per_s: float = 0.0
    concurrency: int = 0  # groups sampled at once at most; 0: not reported
    requests: int | None = None  # running and waiting in the engine; None: not reported
    done: int = 0  # completed groups
    failed: int = 0  # failed groups
    judging: int = 0  # groups held now that only wait for their judge: all samples are generated
    judged: int = 0  # answers of judges, failures too
    judging_ms: int = 0  # the time that all of these answers took together
    judge_failures: int = 0
    judge_buckets: tuple[int, ...] = ()  # how many took how long: see `WorkerRecord.judge_times`
    replaced: int = 0  # processes of a user's functions that hung, crashed or ran out of memory
    lengths: str = ""  # of responses that it began: `LengthCounts.text`


@dataclass(frozen=True, slots=True)
class HeartbeatReport(HeartbeatNumbers):
    """`ack` is the control epoch carried out, `known_epoch` the newest one known (not sent)."""

    ack: int
    weights: PolicyVersion
    state: WorkerState
    refusal: str = ""
    """the newest weights that the engine could not load, and why; "" if it could"""
    known_epoch: int = 0

    def arguments(self) -> dict[str, str | int | None]:
        numbers = {each.name: getattr(self, each.name) for each in fields(HeartbeatNumbers)}
        numbers["tokens_per_s"] = f"{self.tokens_per_s:.1f}"
        numbers["judge_buckets"] = join_counts(self.judge_buckets)
        texts = {"state": self.state.value, "refusal": shorten_reason(self.refusal)}
        return {"ack": self.ack, "weights": str(self.weights), **texts, **numbers}


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRecord(HeartbeatNumbers):
    """One worker as the server knows it. Missing numbers are 0 (`requests`: None), texts empty.

    `silent_ms` is the time since its last heartbeat, `holds` the number of its groups. `bad_groups`
    and `barred_for_ms` are None unless the worker is barred for what it submitted.
    """

    id: str
    silent_ms: int
    holds: int
    bad_groups: int | None = None
    barred_for_ms: int | None = None
    state: str = ""  # a `WorkerState`, or any text of a foreign worker
    weights: str = ""  # "lineage:version", or any text of a foreign worker
    refusal: str = ""  # "lineage:version reason" of published weights that it could not load
    engine: str = ""
    ack: int = 0
    quarantined: int = 0  # groups that a trainer could not use
    joined_ms: int = 0
    seen_ms: int = 0
    facts: Mapping[str, str] = field(default_factory=dict)
    """what else the worker registered: host, pid, …"""

    @property
    def judge_times(self) -> Histogram:
        """The times of all answers of its judges; empty if it counts by other bounds."""
        return Histogram(JUDGE_BOUNDS_S, self.judge_buckets, self.judging_ms / 1000)

    @property
    def is_barred(self) -> bool:
        """Whether the worker gets no groups because trainers could not use what it submitted."""
        return self.barred_for_ms is not None

    def is_live(self, lease_ms: int) -> bool:
        """Return whether a pause waits for it: its last heartbeat is younger than a lease."""
        return self.silent_ms < lease_ms and not self.has_ended

    @property
    def has_ended(self) -> bool:
        return self.state in (WorkerState.LEFT, WorkerState.LOST)


OF_THE_READER = ("id", "silent_ms", "holds", "bad_groups", "barred_for_ms", "facts")
"""Fields that do not come from the worker's hash; these names are ignored there."""

_PRIVATE = ("nonce", "claim", "claimed")


def read_record(
    worker: str, written: Mapping[bytes, bytes], holds: int, suspicion: bytes | None, now_ms: int
) -> WorkerRecord:
    """`suspicion` is the entry of the worker in `bad_submissions`: "since_ms bad barred_ms"."""
    texts = {
        name.decode(errors="replace"): value.decode(errors="replace")
        for name, value in written.items()
    }
    parsed = {name: parse(texts[name]) for name, parse in _PARSERS.items() if name in texts}
    known: dict[str, Any] = {name: value for name, value in parsed.items() if value is not None}
    reserved = (*_PARSERS, *OF_THE_READER, *_PRIVATE)
    facts = {name: text for name, text in texts.items() if name not in reserved}
    _, bad_groups, barred_ms = _suspicion(suspicion or b"")
    return WorkerRecord(
        id=worker,
        silent_ms=now_ms - known.get("seen_ms", 0),
        holds=holds,
        bad_groups=bad_groups if barred_ms else None,
        barred_for_ms=now_ms - barred_ms if barred_ms else None,
        facts=facts,
        **known,
    )


def _suspicion(entry: bytes) -> tuple[int, int, int]:
    """Return the numbers of an entry of `bad_submissions`; 0 for an invalid entry."""
    found = re.fullmatch(rb"(\d+) (\d+) (\d+)", entry)
    return (int(found[1]), int(found[2]), int(found[3])) if found else (0, 0, 0)


def _whole(text: str) -> int | None:
    return int(text) if re.fullmatch(r"-?\d{1,15}", text, re.ASCII) else None


def _rate(text: str) -> float | None:
    is_number = re.fullmatch(r"\d{1,15}(\.\d{1,20})?(e[+-]?\d{1,2})?", text, re.ASCII)
    return float(text) if is_number else None


_PARSER_OF: dict[object, Callable[[str], object]] = {
    "int": _whole,
    "int | None": _whole,
    "float": _rate,
    "tuple[int, ...]": parse_counts,
    "str": str,
}
_PARSERS = {
    each.name: _PARSER_OF[each.type]
    for each in fields(WorkerRecord)
    if each.name not in OF_THE_READER
}
