"""What a worker reports with its heartbeats, and the record that the server keeps of it.

A number is a field of `HeartbeatNumbers`, with its `NumberRow`, and a value that
`producer_workers/worker/worker.py` measures: `rolloutmq workers`, `status`, their JSON, Prometheus
and the browser show it from there. A worker of another language may write anything into its record:
an invalid number counts as not written, and texts are kept as they are.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from itertools import accumulate
from typing import Any, Literal, NamedTuple

from buffer.control.retry_counts import Retries, read_retries
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


class NumberRow(NamedTuple):
    """How a number of a heartbeat is shown. JSON shows every one, by the name of its field."""

    heading: str
    """of its column in `table`, and in the browser"""
    words: str
    """what it counts: the help text of its metric"""
    metric: str = ""
    """name for Prometheus, without `rolloutmq_`; "": no metric"""
    is_counter: bool = False
    table: Literal["", "workers", "judges"] = ""
    """of `rolloutmq workers`; "": only in the browser"""
    total: str = ""
    """what `status` calls the sum over all live workers; "": it shows none"""
    note: str = ""
    """a remark for people about a number that is 0 while all is well; {} stands for the number"""


def _reported(default: Any, heading: str, words: str, **more: Any) -> Any:
    return field(default=default, metadata={"row": NumberRow(heading, words, **more)})


@dataclass(frozen=True, slots=True, kw_only=True)
class HeartbeatNumbers:
    """The numbers of a heartbeat. Counts without another remark are since the worker started."""

    concurrency: int = 0  # groups sampled at once at most; 0: not reported
    requests: int | None = _reported(
        None,
        "load",
        "In its engine, waiting too.",
        metric="worker_engine_requests",
        table="workers",
    )  # None: not reported
    tokens_per_s: float = _reported(
        0.0, "tok/s", "As the worker reports it.", metric="worker_tokens_per_second",
        table="workers", total="tokens/s",
    )  # fmt: skip
    sampling_ms: int = 0  # the time in which its engine had a request
    done: int = _reported(0, "done", "Groups that it completed.", table="workers")
    failed: int = _reported(
        0, "failed", "Groups that failed on it.", metric="worker_groups_failed", is_counter=True
    )
    judging: int = _reported(
        0, "judging", "Held, and only wait for a judge.", metric="worker_groups_judging",
        table="judges",
    )  # fmt: skip
    judged: int = _reported(0, "judged", "Answers of its judges, failures too.", table="judges")
    judge_failures: int = _reported(
        0, "judge failures", "Judges' failures.", metric="worker_judge_failures", is_counter=True,
        table="judges",
    )  # fmt: skip
    judging_ms: int = 0  # the time that all answers of judges took together
    judge_buckets: tuple[int, ...] = ()  # how many took how long: see `WorkerRecord.judge_times`
    retried: str = ""  # rollouts by task and cause: `RetryCounts.text`
    quota_waits: int = _reported(
        0, "waits", "Calls that wait for a quota.", metric="worker_calls_waiting",
    )  # fmt: skip
    quota: str = ""  # a limit for which calls wait, with + for spaces
    quota_refused_ms: int = 0  # for how long the service behind `quota` has refused every call
    replaced: int = _reported(  # processes
        0, "replaced", "Users' code that hung.", metric="worker_processes_replaced",
        is_counter=True,
        note="{} processes of your functions hung, crashed or ran out of memory, and were "
        "replaced; its log names them",
    )  # fmt: skip
    # of its host, as far as known (`HostWatch`): the time since the heartbeat before, and now
    busy_percent: int | None = None  # all processors together
    memory_bytes: int | None = None  # in use
    memory_total_bytes: int | None = None
    disk_free_bytes: int | None = None  # where it was started
    gpu_busy_percent: int | None = None  # the mean of its GPUs
    gpu_memory_bytes: int | None = None  # in use, of all its GPUs
    gpu_memory_total_bytes: int | None = None


HOST_NUMBERS = (
    *("busy_percent", "memory_bytes", "memory_total_bytes", "disk_free_bytes"),
    *("gpu_busy_percent", "gpu_memory_bytes", "gpu_memory_total_bytes"),
)
"""Fields of a heartbeat that are the same for all processes of a host."""


NUMBERS: Mapping[str, NumberRow] = {
    each.name: each.metadata["row"] for each in fields(HeartbeatNumbers) if each.metadata
}
"""The numbers that people see, by the name of the field."""


@dataclass(frozen=True, slots=True)
class HeartbeatReport(HeartbeatNumbers):
    """`ack` is the control epoch carried out, `known_epoch` the newest one known (not sent)."""

    ack: int
    weights: PolicyVersion
    state: WorkerState
    refusal: str = ""
    """the newest weights that the engine could not load, and why; "" if it could"""
    known_epoch: int = 0
    lengths: str = ""
    """of responses that it began: `LengthCounts.text`"""
    sampled: str = ""
    """by task: `TokenCounts.text` of the worker"""

    def arguments(self) -> dict[str, str | int]:
        """Return the arguments of the script; `report` is "name=value name=value"."""
        numbers = {each.name: getattr(self, each.name) for each in fields(HeartbeatNumbers)}
        numbers["tokens_per_s"] = round(self.tokens_per_s, 1)
        numbers["judge_buckets"] = ",".join(map(str, self.judge_buckets))
        return {
            "ack": self.ack,
            "weights": str(self.weights),
            "state": self.state.value,
            "refusal": shorten_reason(self.refusal),
            "report": " ".join(f"{name}={n}" for name, n in numbers.items() if n not in (None, "")),
            "lengths": self.lengths,
            "sampled": self.sampled,
        }


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
    lengths: str = ""  # see `HeartbeatReport`
    quarantined: int = 0  # groups that a trainer could not use
    joined_ms: int = 0
    seen_ms: int = 0
    facts: Mapping[str, str] = field(default_factory=dict)
    """what else the worker registered: host, pid, …"""

    @property
    def retries(self) -> Retries:
        """Rollouts that failed while their group went on, by task and cause."""
        return read_retries(self.retried)

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

_NUMBER_NAMES = [each.name for each in fields(HeartbeatNumbers)]


def read_record(
    worker: str, written: Mapping[bytes, bytes], holds: int, suspicion: bytes | None, now_ms: int
) -> WorkerRecord:
    """`suspicion` is the entry of the worker in `bad_submissions`: "since_ms bad barred_ms"."""
    texts = {
        name.decode(errors="replace"): value.decode(errors="replace")
        for name, value in written.items()
    }
    report = dict(word.split("=", 1) for word in texts.pop("report", "").split() if "=" in word)
    texts |= {name: report.get(name, "") for name in _NUMBER_NAMES}
    parsed = {name: parse(texts[name]) for name, parse in _PARSERS.items() if name in texts}
    known: dict[str, Any] = {name: value for name, value in parsed.items() if value is not None}
    reserved = (*_PARSERS, *OF_THE_READER, "nonce", "claim", "claimed")
    facts = {name: text for name, text in texts.items() if name not in reserved}
    entry = re.fullmatch(rb"(\d+) (\d+) (\d+)", suspicion or b"")
    bad_groups, barred_ms = (int(entry[2]), int(entry[3])) if entry else (0, 0)
    return WorkerRecord(
        id=worker,
        silent_ms=now_ms - known.get("seen_ms", 0),
        holds=holds,
        bad_groups=bad_groups if barred_ms else None,
        barred_for_ms=now_ms - barred_ms if barred_ms else None,
        facts=facts,
        **known,
    )


def _whole(text: str) -> int | None:
    return int(text) if re.fullmatch(r"-?\d{1,15}", text, re.ASCII) else None


def _rate(text: str) -> float | None:
    is_number = re.fullmatch(r"\d{1,15}(\.\d{1,20})?(e[+-]?\d{1,2})?", text, re.ASCII)
    return float(text) if is_number else None


_PARSER_OF: dict[object, Callable[[str], object]] = {
    "int": _whole,
    "int | None": _whole,
    "float": _rate,
    "tuple[int, ...]": lambda text: parse_counts(text.replace(",", " ")),
    "str": str,
}
_PARSERS = {
    each.name: _PARSER_OF[each.type]
    for each in fields(WorkerRecord)
    if each.name not in OF_THE_READER
}
