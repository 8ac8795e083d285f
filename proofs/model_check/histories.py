"""The histories that are explored: few processes and few faults each, so that all of it is seen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from buffer.run.run import Run
from proofs.model_check import operations
from proofs.model_check.processes import (
    FIRST,
    Janitor,
    Operator,
    Process,
    Producer,
    Trainer,
    Worker,
)
from proofs.model_check.world import Budget

TAIL = {"on_straggler": "retry"}


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
    limits: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def prepare(self, run: Run) -> None:
        producer = "a" * 32
        if self.waiting or self.ready:
            operations.open_producer(run, producer, True)
        for draw in range(self.waiting + self.ready):
            operations.enqueue(run, producer, f"{draw:032x}", draw, draw + 1)
        if self.ready:
            operations.register(run, "before", "b" * 32)
            claim = operations.claim(run, "before", "b" * 32, "c" * 32, FIRST, self.ready)
            for job in claim.jobs:
                operations.submit(run, "before", job, (FIRST,), "completed")
            operations.deregister(run, "before", "b" * 32)


W0, W1 = Worker("w0"), Worker("w1")

ALL = Janitor(("reap", "refresh", "expire_waiting", "collect"))

PRODUCER = Producer(2, is_opened_first=True)
TRAINER = Trainer(2, is_opened_first=True)
WAITING_TRAINER, WAITING_PRODUCER = Trainer(1, takes_over=False), Producer(1, takes_over=False)

HISTORIES = (
    History(
        "unusable groups are replaced",
        (TRAINER._replace(steps=1, batch=2),),
        Budget(bad_groups=1, deaths=1, late_calls=1),
        ready=3,
    ),
    History(
        "unusable groups leave open positions",
        (TRAINER._replace(steps=1, batch=2), W0),
        Budget(bad_groups=1),
        waiting=2,
        ready=2,
    ),
    History(
        "other calls of a dead trainer arrive late",
        (TRAINER._replace(steps=1),),
        Budget(deaths=1, late_calls=1, side_calls=1),
        ready=1,
    ),
    History(
        "other calls of a dead producer arrive late",
        (PRODUCER._replace(groups=1),),
        Budget(deaths=1, late_calls=1, side_calls=1),
    ),
    History(
        "trainers wait for each other",
        (WAITING_TRAINER._replace(is_opened_first=True), WAITING_TRAINER),
        Budget(jumps=1, side_calls=1),
        ready=1,
    ),
    History(
        "producers wait for each other",
        (WAITING_PRODUCER._replace(is_opened_first=True), WAITING_PRODUCER),
        Budget(jumps=1, side_calls=1),
    ),
    History(
        "an older checkpoint is opened",
        (TRAINER._replace(kept=2),),
        Budget(deaths=1, older=1),
        ready=2,
    ),
    History(
        "a checkpoint that is no longer kept is opened",
        (TRAINER,),
        Budget(deaths=1, older=1),
        ready=2,
    ),
    History(
        "a pause leaves a lane open",
        (Operator(0, "resume"), W0, PRODUCER._replace(draws=2)),
        Budget(pauses=1, aborts=1),
        waiting=1,
    ),
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
        "calls of a dead trainer arrive late", (TRAINER,), Budget(deaths=2, late_calls=1), ready=2
    ),
    History("calls of a trainer arrive late", (TRAINER,), Budget(late_calls=1), ready=2),
    History("a worker dies or falls silent", (W0, Janitor()), Budget(deaths=1, ticks=3), waiting=1),
    History(
        "groups are submitted together",
        (W0._replace(capacity=2), Janitor()),
        Budget(deaths=1, lost_replies=1, late_calls=1, ticks=2, aborts=1),
        waiting=2,
    ),
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
    History("a silent worker wakes up", (W0, W1, Janitor()), Budget(ticks=3), waiting=1),
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
        limits={"max_tries": 1},
    ),
    History(
        "an operator revokes, a worker falls silent",
        (Operator(1), W0, Janitor()),
        Budget(commands=2, ticks=2),
        waiting=1,
    ),
    History(
        "aborted groups are started again",
        (PRODUCER._replace(groups=1), W0),
        Budget(deaths=1, aborts=2, late_calls=1),
        waiting=1,
    ),
    History(
        "groups become too old",
        (TRAINER._replace(steps=3), W0, ALL, PRODUCER._replace(groups=4)),
        Budget(aborts=1),
        ready=3,
        limits={"on_straggler": "retry"},
    ),
    History("weights of a dead trainer", (TRAINER, W0, PRODUCER), Budget(deaths=1), ready=1),
    History(
        "everything at once",
        (Producer(2), W0, W1, Trainer(2), ALL),
        Budget(deaths=2, lost_replies=2, late_calls=1, ticks=3, jumps=1, aborts=1, failures=1),
    ),
    History(
        "an operator requeues a dead group",
        (Operator(1), W0),
        Budget(commands=1, failures=1),
        waiting=1,
        limits={"max_tries": 1},
    ),
    History(
        "the responses of a dead group arrive late",
        (Operator(1), W0, Janitor(("reap", "collect"))),
        Budget(commands=1, failures=2, deaths=1, lost_replies=1, late_calls=1, ticks=2),
        waiting=1,
        limits={"max_tries": 1},
    ),
    History("a heartbeat is overtaken", (W0,), Budget(ticks=1), waiting=2),
    History(
        "calls of a producer arrive late", (PRODUCER._replace(groups=3),), Budget(late_calls=1)
    ),
    History(
        "a worker without heartbeats",
        (W0._replace(beats=False), Janitor()),
        Budget(ticks=4),
        waiting=1,
    ),
    History(
        "memory is almost full",
        (W0, W1, PRODUCER._replace(groups=3)),
        Budget(),
        waiting=2,
        limits={"low_bytes": 300},
    ),
    History(
        "open positions are filled",
        (TRAINER._replace(steps=1, batch=2), W0._replace(beats=False)),
        Budget(bad_groups=1),
        waiting=1,
        ready=2,
    ),
    History(
        "open positions are filled, on-policy",
        (
            TRAINER._replace(steps=1, batch=2),
            W0._replace(beats=False),
            Janitor(("reap", "refresh")),
        ),
        Budget(bad_groups=1),
        waiting=1,
        ready=2,
        limits={"stale_threshold": 1},
    ),
    History("a worker confirms a pause", (Operator(0), W0), Budget(pauses=1), waiting=1),
    History("a worker has old weights", (TRAINER, W0._replace(beats=False)), Budget(), 1, 1),
    History(
        "a trainer dies while it opens the run",
        (Trainer(0),),
        Budget(deaths=1, late_calls=1),
        ready=1,
    ),
    History("a worker gives a group back", (W0,), Budget(handbacks=1), waiting=1),
    History(
        "turns of agents are kept",
        (W0._replace(beats=False), Janitor(("reap", "collect"))),
        Budget(deaths=1, late_calls=1, ticks=3, turns=2),
        waiting=1,
    ),
)
