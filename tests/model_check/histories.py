"""The histories that are explored: few processes and few faults each, so that all of it is seen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from buffer.model.ids import group_id
from buffer.run import Run
from tests.model_check import operations
from tests.model_check.operations import TASK
from tests.model_check.processes import (
    FIRST,
    Janitor,
    Operator,
    Process,
    Producer,
    Trainer,
    Worker,
)
from tests.model_check.world import Budget

TAIL = {"tail_batch_trigger_size": 0}


@dataclass(frozen=True)
class History:
    """Who takes part and which faults may happen.

    `waiting` groups are enqueued and `ready` ones completed before it begins.
    """

    name: str
    processes: tuple[Process, ...]
    budget: Budget
    waiting: int = 0
    ready: int = 0
    limits: Mapping[str, Any] = field(default_factory=dict)

    def prepare(self, run: Run) -> None:
        producer = "a" * 32
        if self.waiting or self.ready:
            operations.open_producer(run, producer, True)
        for draw in range(self.waiting + self.ready):
            gid = group_id(TASK, draw)
            operations.enqueue(run, producer, f"{draw:032x}", draw, gid, draw + 1)
        if self.ready:
            operations.register(run, "before", "b" * 32)
            claim = operations.claim(run, "before", "b" * 32, "c" * 32, FIRST, self.ready)
            for job in claim.jobs:
                operations.submit(run, "before", job, (FIRST,), "completed")
            operations.deregister(run, "before", "b" * 32)


W0, W1 = Worker("w0"), Worker("w1")

ALL = Janitor(("reap", "refresh", "expire_waiting", "collect"))

HISTORIES = (
    History(
        "producers replace each other",
        (Producer(2),),
        Budget(deaths=2, lost_replies=1, late_calls=1),
    ),
    History(
        "a trainer dies, and a reply is lost",
        (Trainer(2),),
        Budget(deaths=1, lost_replies=1),
        ready=2,
    ),
    History(
        "calls of a dead trainer arrive late",
        (Trainer(2),),
        Budget(deaths=2, late_calls=1),
        ready=2,
    ),
    History("a worker dies or falls silent", (W0, Janitor()), Budget(deaths=1, ticks=3), waiting=1),
    History(
        "replies to a worker are lost",
        (W0, Janitor()),
        Budget(lost_replies=1, ticks=3, failures=1),
        waiting=1,
    ),
    History(
        "calls of a dead worker arrive late",
        (W0, W1),
        Budget(deaths=1, late_calls=1, failures=1),
        waiting=1,
    ),
    History(
        "a silent worker wakes up",
        (W0, W1, Janitor()),
        Budget(ticks=3),
        waiting=1,
    ),
    History(
        "the clock jumps, and is set back",
        (W0, Janitor()),
        Budget(ticks=1, jumps=1, setbacks=1),
        waiting=1,
    ),
    History(
        "two workers, two groups",
        (W0._replace(capacity=2), W1),
        Budget(handbacks=1, filters=1, aborts=1, failures=1),
        waiting=2,
    ),
    History(
        "an operator interferes",
        (Operator(1), W0),
        Budget(commands=1, pauses=1, late_calls=1, failures=1),
        waiting=1,
    ),
    History(
        "an operator revokes, a worker falls silent",
        (Operator(1), W0, Janitor()),
        Budget(commands=2, ticks=2),
        waiting=1,
    ),
    History(
        "aborted groups are started again",
        (Producer(1), W0),
        Budget(deaths=1, aborts=2, late_calls=1),
        waiting=1,
    ),
    History(
        "groups become too old",
        (Trainer(3), W0, ALL, Producer(4)),
        Budget(aborts=1),
        ready=3,
        limits={"tail_batch_trigger_size": 0},
    ),
    History(
        "weights of a dead trainer",
        (Trainer(2), W0, Producer(2)),
        Budget(deaths=1),
        ready=1,
    ),
    History(
        "everything at once",
        (Producer(2), W0, W1, Trainer(2), ALL),
        Budget(deaths=2, lost_replies=2, late_calls=1, ticks=3, jumps=1, aborts=1, failures=1),
    ),
)
