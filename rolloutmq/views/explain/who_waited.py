"""Who waited for whom in the last train steps: a lane of spans for the trainer and each worker.

The trainer's spans are those of its step log; a worker's follow from the events that name it, and
the groups that it holds now. Clocks of machines may differ by milliseconds.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
_RESETS = _GONE | {"worker_joined"}  # it holds nothing after these
MUCH, LITTLE = 0.3, 0.1  # shares of the time from which, and below which, a wait has a remedy


class LaneSpan(NamedTuple):
    began_s: float
    ended_s: float
    what: str


@dataclass(frozen=True, slots=True)
class Waits:
    """`steps`: how many train steps the window has; 0: it is that of the newest events."""

    steps: int
    began_s: float
    ended_s: float
    trainer: list[LaneSpan]
    workers: dict[str, list[LaneSpan]]
    group_s: float = 0.0  # mean time of a group on a worker, and of a judge's answer; 0: unknown
    judge_s: float = 0.0

    @property
    def shares(self) -> dict[str, dict[str, float]]:
        """The shares of the time of the trainer, and of all workers together, by what they did."""
        workers = [span for spans in self.workers.values() for span in spans]
        whole_s = sum(ended_s - began_s for began_s, ended_s, _ in workers)
        return {
            "trainer": _shares(self.trainer, self.ended_s - self.began_s),
            "workers": _shares(workers, whole_s),
        }

    def __str__(self) -> str:
        trainer, workers = self.shares["trainer"], self.shares["workers"]
        whole_s = self.ended_s - self.began_s
        said = []
        if trainer:
            waits = f"{trainer.get('wait', 0):.0%} of the time for groups"
            said.append(f"the trainer waited {waits}, {trainer.get('publish', 0):.0%} to publish")
        if workers:
            jobs, weights, partly = (workers.get(what, 0) for what in ("jobs", "weights", "partly"))
            waits = f"{jobs:.0%} for jobs, {weights:.0%} for weights"
            said.append(f"workers waited {waits}, and were half empty {partly:.0%}")
        if self.judge_s and self.group_s:
            judge = f"a judge's answer {self.judge_s:.1f} s"
            said.append(f"a group takes {self.group_s:.1f} s, {judge}")
        last = plural(self.steps, "step") if self.steps else age(1000 * whole_s)
        return f"in the last {last}, {'; '.join(said)}"

    @property
    def advice(self) -> str:
        """Return what would shorten the longest wait; "" where none is long."""
        trainer, workers = self.shares["trainer"], self.shares["workers"]
        if workers.get("jobs", 0) > MUCH:
            return "the trainer is the bottleneck: fewer workers do as well"
        is_short = trainer.get("wait", 0) > MUCH and workers.get("jobs", 0) < LITTLE
        return "generation is the bottleneck: add workers" if is_short else ""

    def document(self) -> dict[str, Any]:
        """Return the lanes for a drawing, without very short spans."""
        shortest_s = (self.ended_s - self.began_s) * SHORTEST
        workers = dict(sorted(self.workers.items())[:MOST_WORKERS])
        lanes = {"trainer": self.trainer, **workers} if self.trainer else workers
        drawn = {
            name: [[*span] for span in spans if span.ended_s - span.began_s >= shortest_s]
            for name, spans in lanes.items()
        }
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
    known = [step for step in steps[-STEPS:] if (step.ended_s or 0.0) > began_s]
    trainer = [span for step in known for span in _parts(step)]
    if trainer:
        began_s, ended_s = max(began_s, trainer[0].began_s), known[-1].ended_s or ended_s
    elif snap.mode == "finish":
        ended_s = events[-1][0] / 1000
    window = (began_s, max(began_s, ended_s))
    workers = _workers(events, snap)
    lanes = {name: cut for name, spans in workers if (cut := [*_within(spans, *window)])}
    if not (trainer or lanes):
        return None
    return Waits(len(known), *window, [*_within(trainer, *window)], lanes, *_times(snap))


def _times(snap: RunView) -> tuple[float, float]:
    """Return the mean seconds of a group on a worker, and of a judge's answer; 0: unknown."""
    groups = sum(task.number("produced_groups") for task in snap.training)
    groups_ms = sum(task.number("produced_ms") for task in snap.training)
    answers = sum(worker.judged for worker in snap.workers)
    answers_ms = sum(worker.judging_ms for worker in snap.workers)
    return groups_ms / max(groups, 1) / 1000, answers_ms / max(answers, 1) / 1000


def _parts(step: TrainedStep) -> Iterator[LaneSpan]:
    """Yield the parts of a step in their order, up to its end."""
    if step.ended_s is None:
        return
    at_s = step.ended_s - step.metrics.get("time/step_s", 0.0)
    for part in PARTS:
        seconds = step.metrics.get(f"time/{part}_s", 0.0)
        if seconds > 0:
            yield LaneSpan(at_s, at_s + seconds, part)
        at_s += seconds


@dataclass(slots=True)
class _Lane:
    """A worker at one moment of the events, and its spans so far."""

    held: int
    most: int
    changed_s: float
    is_there: bool = True
    is_behind: bool = False  # newer weights were published, and it has claimed nothing since
    spans: list[LaneSpan] = field(default_factory=list)

    def close(self, at_s: float, mode: str) -> None:
        """Add the span that ends now."""
        if self.is_there and at_s > self.changed_s:
            span = LaneSpan(self.changed_s, at_s, self._what(mode))
            last = self.spans[-1] if self.spans else None
            if last and (last.what, last.ended_s) == (span.what, span.began_s):
                self.spans[-1] = span._replace(began_s=last.began_s)
            else:
                self.spans.append(span)
        self.changed_s = max(self.changed_s, at_s)

    def _what(self, mode: str) -> str:
        if mode == "keep" or (mode != "run" and not self.held):
            return "paused"
        if not self.held:
            return "weights" if self.is_behind else "jobs"
        return "works" if not self.most or 2 * self.held >= self.most else "partly"


def _workers(events: Sequence[Event], snap: RunView) -> Iterator[tuple[str, list[LaneSpan]]]:
    """Yield each worker with its spans over all events."""
    lanes = _first(events, snap)
    mode = "run"
    for at_ms, name, fields in events:
        own = lanes.get(fields.get("worker", ""))
        for lane in lanes.values() if name in ("control", "weights") else [own] if own else []:
            lane.close(at_ms / 1000, mode)
        if name == "control":
            mode = fields.get("mode", mode)
        elif name == "weights":
            for lane in lanes.values():
                lane.is_behind = True
        elif own:
            own.held = 0 if name in _RESETS else max(0, own.held + _change(name, fields))
            own.is_behind &= name != "claimed"
            own.is_there = name not in _GONE
    for worker, lane in lanes.items():
        lane.close(snap.now_ms / 1000, mode)
        yield worker, lane.spans


def _first(events: Sequence[Event], snap: RunView) -> dict[str, _Lane]:
    """Return every worker as it was before the first event."""
    held: defaultdict[str, int] = defaultdict(int)
    held |= {worker.id: worker.holds for worker in snap.workers}
    joins: dict[str, float] = {}
    for at_ms, name, fields in reversed(events):
        if worker := fields.get("worker", ""):
            held[worker] = 0 if name in _RESETS else held[worker] - _change(name, fields)
            joins[worker] = at_ms / 1000 if name == "worker_joined" else joins.get(worker, 0.0)
    most = {worker.id: worker.concurrency for worker in snap.workers}
    began_s = events[0][0] / 1000
    return {
        worker: _Lane(max(0, groups), most.get(worker, 0), joins.get(worker) or began_s)
        for worker, groups in held.items()
    }


def _change(name: str, fields: Mapping[str, str]) -> int:
    groups = fields.get("groups", "")
    if name == "claimed":
        return int(groups) if re.fullmatch(r"\d{1,6}", groups) else 0
    return -1 if name in _ENDS else 0


def _within(spans: Iterable[LaneSpan], began_s: float, ended_s: float) -> Iterator[LaneSpan]:
    for span in spans:
        cut = LaneSpan(max(span.began_s, began_s), min(span.ended_s, ended_s), span.what)
        if cut.ended_s > cut.began_s:
            yield cut


def _shares(spans: list[LaneSpan], whole_s: float) -> dict[str, float]:
    shares: defaultdict[str, float] = defaultdict(float)
    for began_s, ended_s, what in spans:
        shares[what] += (ended_s - began_s) / max(whole_s, 1e-9)
    return shares
