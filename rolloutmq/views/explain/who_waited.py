"""Who waited for whom in the last train steps: a lane of spans for the trainer and each worker.

The trainer's spans are read from its step log. Those of a worker are derived from the events that
name it and from the number of groups that it holds now. Clocks of machines may differ by
milliseconds.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from buffer.control.events import Event
from buffer.run import Run
from consumer.grpo.reporting.step_log import TrainedStep
from rolloutmq.output import age, plural
from rolloutmq.views.run_view import RunView

STEPS = 10
MOST_EVENTS = 5000
SHORTEST = 1 / 500  # of the window: shorter spans are not drawn
MOST_WORKERS = 32  # that are drawn
PARTS = ("wait", "read", "pause", "train", "publish")  # of a train step, in their order
_ENDS = frozenset({"completed", "aborted", "filtered", "released", "reaped"})
_GONE = frozenset({"worker_left", "worker_lost", "worker_fenced"})
MUCH, LITTLE = 0.3, 0.1  # shares of the time from which, and below which, a wait has a remedy


class LaneSpan(NamedTuple):
    began_s: float
    ended_s: float
    what: str


@dataclass(frozen=True, slots=True)
class Waits:
    """`steps`: the number of train steps in the window; 0 if it is that of the newest events."""

    steps: int
    began_s: float
    ended_s: float
    trainer: list[LaneSpan]
    workers: dict[str, list[LaneSpan]]

    @property
    def shares(self) -> dict[str, defaultdict[str, float]]:
        """The shares of the time of the trainer, and of all workers together, by what they did."""
        workers = [span for spans in self.workers.values() for span in spans]
        whole_s = sum(span.ended_s - span.began_s for span in workers)
        return {
            "trainer": _shares(self.trainer, self.ended_s - self.began_s),
            "workers": _shares(workers, whole_s),
        }

    def __str__(self) -> str:
        trainer, workers = self.shares["trainer"], self.shares["workers"]
        said = []
        if trainer:
            waits = f"{trainer['wait']:.0%} of the time for groups"
            said.append(f"the trainer waited {waits}, {trainer['publish']:.0%} to publish")
        if workers:
            waits = f"{workers['jobs']:.0%} for jobs, {workers['weights']:.0%} for weights"
            said.append(f"workers waited {waits}, and were half empty {workers['partly']:.0%}")
        window = age(1000 * (self.ended_s - self.began_s))
        last = plural(self.steps, "step") if self.steps else window
        return f"in the last {last}, {'; '.join(said)}"

    @property
    def advice(self) -> str:
        """Return what would shorten the longest wait; "" where none is long."""
        trainer, workers = self.shares["trainer"], self.shares["workers"]
        if workers["jobs"] > MUCH:
            return "the trainer is the bottleneck: fewer workers do as well"
        is_short = trainer["wait"] > MUCH and workers["jobs"] < LITTLE
        return "generation is the bottleneck: add workers" if is_short else ""

    def document(self) -> dict[str, Any]:
        """Return the lanes for a drawing, without very short spans."""
        shortest_s = (self.ended_s - self.began_s) * SHORTEST
        lanes = [("trainer", self.trainer)] if self.trainer else []
        lanes += sorted(self.workers.items())[:MOST_WORKERS]
        drawn = [
            (name, [[*span] for span in spans if span.ended_s - span.began_s >= shortest_s])
            for name, spans in lanes
        ]
        window = {"began_s": self.began_s, "ended_s": self.ended_s}
        return window | {"words": str(self), "lanes": drawn}


def _shares(spans: list[LaneSpan], whole_s: float) -> defaultdict[str, float]:
    shares: defaultdict[str, float] = defaultdict(float)
    for began_s, ended_s, what in spans:
        shares[what] += (ended_s - began_s) / max(whole_s, 1e-9)
    return shares


def read_waits(run: Run, snap: RunView, steps: Sequence[TrainedStep]) -> Waits | None:
    """Return who waited in the last of `steps`; None without a trained step and a worker.

    Reads up to MOST_EVENTS events in one round trip; the window is no longer than these.
    """
    events = run.events.last(MOST_EVENTS)
    if not events:
        return None
    began_s, ended_s = events[0][0] / 1000, snap.now_ms / 1000
    known = [step for step in steps[-STEPS:] if (step.began_s or 0.0) >= began_s]
    trainer = [span for step in known for span in _parts(step)]
    if trainer:
        began_s, ended_s = trainer[0].began_s, known[-1].ended_s or ended_s
    elif snap.mode == "finish":
        ended_s = events[-1][0] / 1000
    lanes = {}
    for worker, lane in _lanes(events, snap).items():
        cut = [(max(begin, began_s), min(end, ended_s), what) for begin, end, what in lane.spans]
        if spans := [LaneSpan(*span) for span in cut if span[0] < span[1]]:
            lanes[worker] = spans
    if not (trainer or lanes):
        return None
    return Waits(len(known), began_s, ended_s, trainer, lanes)


def _parts(step: TrainedStep) -> Iterator[LaneSpan]:
    """Yield the parts of a step in their order."""
    at_s = step.began_s or 0.0
    for part in PARTS:
        seconds = step.metrics.get(f"time/{part}_s", 0.0)
        if seconds > 0:
            yield LaneSpan(at_s, at_s + seconds, part)
        at_s += seconds


@dataclass(slots=True)
class _Lane:
    """A worker at one moment of the events, and its spans so far."""

    held: int = 0
    most: int = 0
    is_there: bool = True
    is_behind: bool = False  # newer weights were published, and it has claimed nothing since
    what: str = ""  # it does since `since_s`; "" while it is not there
    since_s: float = 0.0
    spans: list[LaneSpan] = field(default_factory=list)

    def turn_to(self, what: str, at_s: float) -> None:
        if what != self.what:
            if self.what:
                self.spans.append(LaneSpan(self.since_s, at_s, self.what))
            self.what, self.since_s = what, at_s

    def apply(self, name: str, fields: Mapping[str, str]) -> None:
        """Change the state by an event that names this worker."""
        is_reset = name in _GONE or name == "worker_joined"
        self.held = 0 if is_reset else max(0, self.held + _change(name, fields))
        self.is_behind &= name != "claimed"
        self.is_there = name not in _GONE

    def does(self, mode: str) -> str:
        if not self.is_there:
            return ""
        if mode == "keep" or (mode != "run" and not self.held):
            return "paused"
        if not self.held:
            return "weights" if self.is_behind else "jobs"
        return "works" if not self.most or 2 * self.held >= self.most else "partly"


def _lanes(events: Sequence[Event], snap: RunView) -> dict[str, _Lane]:
    """Return each worker with its spans over all events."""
    lanes = _first(events, snap)
    mode = "run"
    for lane in lanes.values():
        lane.turn_to(lane.does(mode), events[0][0] / 1000)
    for at_ms, name, fields in events:
        own = lanes.get(fields.get("worker", ""))
        if name == "control":
            mode = fields.get("mode", mode)
        elif own:
            own.apply(name, fields)
        for lane in lanes.values() if name in ("control", "weights") else [own] if own else []:
            lane.is_behind |= name == "weights"
            lane.turn_to(lane.does(mode), at_ms / 1000)
    for lane in lanes.values():
        lane.turn_to("", snap.now_ms / 1000)
    return lanes


def _first(events: Sequence[Event], snap: RunView) -> dict[str, _Lane]:
    """Return every worker as it was before the first event, counted back from the last one."""
    lanes = {worker.id: _Lane(worker.holds, worker.concurrency) for worker in snap.workers}
    for _, name, fields in reversed(events):
        if worker := fields.get("worker", ""):
            lane = lanes.setdefault(worker, _Lane())
            lane.held -= _change(name, fields)
            if name in _GONE or name == "worker_joined":
                lane.held, lane.is_there = 0, name in _GONE
    for lane in lanes.values():
        lane.held = max(0, lane.held)
    return lanes


def _change(name: str, fields: Mapping[str, str]) -> int:
    """Return by how many groups an event changes what its worker holds."""
    groups = fields.get("groups", "")
    if name == "claimed":
        return int(groups) if re.fullmatch(r"\d{1,6}", groups) else 0
    return -1 if name in _ENDS else 0
