"""How far a run is: what the scripts counted, as one reading (XTuner's `ProduceProgress`).

Every number is absolute and cumulative, and moves in the same script as the groups it counts. What
happened in a while is the difference of two readings: nothing is reset, so that two who look do not
take each other's share.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from buffer.model.ids import LANES, POOLS
from buffer.store.keys import Keys
from buffer.store.store import Store

NO_SUMS = ("target", "running", "cursor", "ahead", "failures_in_row")


@dataclass(frozen=True, slots=True)
class TaskProgress:
    """Counts of one task since the run began. Groups, where nothing else is said."""

    target: int = 0
    """that may have been started or used, in all, by the newest order of the producer or of an
    evaluation
    """
    enqueued: int = 0
    consumed: int = 0
    raw_rewards_sum: float = 0.0
    """scores of completed groups before any was filtered"""
    raw_rewards_count: int = 0
    """how many scores that are"""
    produced_samples: int = 0
    """rollouts in groups that were handed in"""
    produced_tokens: int = 0
    """generated tokens, those of an earlier claim not counted again"""
    failed: int = 0
    """tries that ended in an error or a lost lease"""
    filtered: int = 0
    dropped: int = 0
    expirations: int = 0
    dead: int = 0
    running: int = 0
    """at this moment, as is what follows"""
    cursor: int = 0
    """the next draw"""
    ahead: int = 0
    """groups that came in although the cursor has not passed them (after a loss)"""
    failures_in_row: int = 0

    @classmethod
    def parse(cls, counters: Mapping[str, str]) -> TaskProgress:
        """From the fields of `progress:<task>`; what is not there yet is 0."""
        counts: dict[str, Any] = {
            f.name: int(float(counters.get(f.name) or 0)) for f in fields(cls)
        }
        return cls(**{**counts, "raw_rewards_sum": float(counters.get("raw_rewards_sum") or 0)})

    def since(self, earlier: TaskProgress) -> TaskProgress:
        """What was added. What is no sum stays as it is: the target, and all that is of a moment."""
        added: dict[str, Any] = {
            f.name: getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self)
        }
        return TaskProgress(**{**added, **{name: getattr(self, name) for name in NO_SUMS}})


@dataclass(frozen=True, slots=True)
class Leftovers:
    """Groups of one task that are in a pool, or wait for a worker, at this moment."""

    completed: int
    aborted: int
    expired: int
    waiting: int = 0


@dataclass(frozen=True, slots=True)
class ProduceProgress:
    """One reading of a run. `tasks` and `leftovers` have every task that was asked for, and no
    default for others.

    `next_consumer_step`: the train step that is taken next.
    """

    next_consumer_step: int
    tasks: Mapping[str, TaskProgress]
    leftovers: Mapping[str, Leftovers]

    def since(self, earlier: ProduceProgress) -> dict[str, TaskProgress]:
        """What each task did between two readings."""
        return {task: now.since(earlier.tasks[task]) for task, now in self.tasks.items()}


def read_progress(store: Store, keys: Keys, tasks: list[str]) -> ProduceProgress:
    """One round trip, whatever the run holds."""
    pipe = store.control.pipeline(transaction=False)
    for task in tasks:
        pipe.hgetall(keys.progress(task))
        for status in POOLS:
            pipe.zcard(keys.pool(task, status))
        for lane in LANES:
            pipe.xlen(keys.jobs(task, lane))
    pipe.hmget(keys.cursors, tasks)
    # last: of a batch that is taken meanwhile the step is seen, rather than what it used: nobody
    # starts too much
    pipe.hget(keys.ledger("train"), "taken")
    *rows, cursors, taken = store.retrying("progress", pipe.execute)
    width = 1 + len(POOLS) + len(LANES)
    pooled = 1 + len(POOLS)
    parts = {task: rows[i * width : (i + 1) * width] for i, task in enumerate(tasks)}
    counters = {
        task: {k.decode(): v.decode() for k, v in part[0].items()} for task, part in parts.items()
    }
    for task, cursor in zip(tasks, cursors, strict=True):
        counters[task]["cursor"] = (cursor or b"0").decode()
    return ProduceProgress(
        next_consumer_step=int(taken or 0) + 1,
        tasks={task: TaskProgress.parse(counters[task]) for task in tasks},
        leftovers={
            task: Leftovers(
                **dict(zip(POOLS, part[1:pooled], strict=True)), waiting=sum(part[pooled:])
            )
            for task, part in parts.items()
        },
    )
