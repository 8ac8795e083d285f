"""Who waited for whom in the last train steps: a lane of spans for the trainer and each worker.

The trainer's spans are read from its step log. Those of a worker are derived from the events that
name it and from the number of groups that it holds now. Clocks of machines may differ by
milliseconds.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from buffer.control.events import Event
from buffer.run.run import Run
from consumer.handle.step_log import TrainedStep
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

    @property
    def seconds(self) -> float:
        return self.ended_s - self.began_s


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
        found = {"trainer": defaultdict[str, float](float), "workers": defaultdict(float)}
        whole_s = self.ended_s - self.began_s, sum(span.seconds for span in workers)
        for shares, spans, of_s in zip(
            found.values(), (self.trainer, workers), whole_s, strict=True
        ):
            for span in spans:
                shares[span.what] += span.seconds / max(of_s, 1e-9)
        return found

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
            (name, [[*span] for span in spans if span.seconds >= shortest_s])
            for name, spans in lanes
        ]
        window = {"began_s": self.began_s, "ended_s": self.ended_s}
        return window | {"words": str(self), "lanes": drawn}


def read_waits(run: Run, snap: RunView, steps: Sequence[TrainedStep]) -> Waits | None:
    """Return who waited in the last of `steps`; None without a trained step and a worker.

    Reads up to MOST_EVENTS events in one round trip; the window is no longer than these.
    """
    events = run.events.last(MOST_EVENTS)
    if not events:
        return None
    began_s, ended_s = events[0][0] / 1000, snap.now_ms / 1000
    known = [step for step in steps[-STEPS:] if (step.began_s or 0.0) >= began_s]
    trainer = []
    for step in known:
        at_s = step.began_s or 0.0
        for part in PARTS:
            seconds = max(0.0, step.metrics.get(f"time/{part}_s", 0.0))
            trainer += [LaneSpan(at_s, at_s + seconds, part)] if seconds else []
            at_s += seconds
    if trainer:
        began_s, ended_s = trainer[0].began_s, known[-1].ended_s or ended_s
    elif snap.mode == "finish":
        ended_s = events[-1][0] / 1000
    workers = {}
    for worker, lane in _lanes(events, snap).items():
        cut = [LaneSpan(max(a, began_s), min(b, ended_s), what) for a, b, what in lane.spans]
        if spans := [span for span in cut if span.seconds > 0]:
            workers[worker] = spans
    return Waits(len(known), began_s, ended_s, trainer, workers) if trainer or workers else None


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
    lanes = {worker.id: _Lane(worker.holds, worker.concurrency) for worker in snap.workers}
    # count back from now to before the first event
    for _, name, fields in reversed(events):
        if worker := fields.get("worker", ""):
            lane = lanes.setdefault(worker, _Lane())
            lane.held -= _change(name, fields)
            if name in _GONE or name == "worker_joined":
                lane.held, lane.is_there = 0, name in _GONE
    mode = "run"
    for lane in lanes.values():
        lane.held = max(0, lane.held)
        lane.turn_to(lane.does(mode), events[0][0] / 1000)
    for at_ms, name, fields in events:
        own = lanes.get(fields.get("worker", ""))
        changed = [own] if own else []
        if name in ("control", "weights"):
            mode, changed = fields.get("mode", mode), [*lanes.values()]
        elif own:
            is_reset = name in _GONE or name == "worker_joined"
            own.held = 0 if is_reset else max(0, own.held + _change(name, fields))
            own.is_behind &= name != "claimed"
            own.is_there = name not in _GONE
        for lane in changed:
            lane.is_behind |= name == "weights"
            lane.turn_to(lane.does(mode), at_ms / 1000)
    for lane in lanes.values():
        lane.turn_to("", snap.now_ms / 1000)
    return lanes


def _change(name: str, fields: Mapping[str, str]) -> int:
    """Return by how many groups an event changes what its worker holds."""
    groups = fields.get("groups", "")
    if name == "claimed":
        return int(groups) if re.fullmatch(r"\d{1,6}", groups) else 0
    return -1 if name in _ENDS else 0
