"""Read how far a run is, as the scripts count it (XTuner's `ProduceProgress`).

Every number is absolute, and changes in the same script as the groups that it counts. Subtract two
readings to get a period: nothing is ever reset, so readers do not disturb each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from buffer.ids import LANES, POOLS
from buffer.redis.bulk_io import Command
from buffer.redis.key_fields import read_counts, require_fields, text_fields
from buffer.redis.keys import Keys
from buffer.redis.store import Store
from buffer.wire.staleness import next_step

# fields that are no sums: a difference keeps the newer value
NO_SUMS = (
    "target", "running", "cursor", "reentered", "failures_in_row", "filtered_in_row", "tail_step",
    "begins", "awaited", "awaited_step", "stopped",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class TaskProgress:
    """Counts of one task since the run began, in groups unless stated otherwise."""

    target: int = 0
    """groups in all that may be started or used, as the producer last set it; of an evaluation, the
    draw behind its last problem
    """
    enqueued: int = 0
    consumed: int = 0
    raw_rewards_sum: float = 0.0  # scores of completed groups, before any is filtered
    raw_rewards_count: int = 0  # number of these scores
    unparsed: int = 0  # rollouts of these groups in which no judge found an answer
    truncated: int = 0  # rollouts of these groups that ended at their token limit
    produced_groups: int = 0  # groups completed or filtered
    produced_ms: int = 0  # time that workers held these groups, in sum
    produced_samples: int = 0  # rollouts in submitted groups
    produced_tokens: int = 0  # without those of an earlier claim
    failed: int = 0  # tries that ended in an error or a lost lease
    filtered: int = 0
    dropped: int = 0
    skipped: int = 0
    expirations: int = 0
    ended_early: int = 0  # groups, running or waiting, that could serve no train step any more
    discarded_tokens: int = 0  # tokens that these groups had
    unmade_tokens: int = 0  # tokens that these groups could still generate, at most
    dead: int = 0
    running: int = 0  # groups; this and the following fields are of the moment
    cursor: int = 0  # the next draw
    reentered: int = 0  # groups submitted beyond the cursor, after the server lost data
    failures_in_row: int = 0
    filtered_in_row: int = 0
    tail_step: int = 0  # last train step of the newest tail batch
    begins: int = 0  # first draw of the newest evaluation
    awaited: int = 0  # groups that batch `awaited_step` lacked when the trainer last waited
    awaited_step: int = 0
    stopped: str = ""  # why the scripts start nothing more of the task; empty while they do

    @classmethod
    def parse(cls, counters: Mapping[str, str]) -> TaskProgress:
        """Return the counts in the fields of `progress:<task>`; missing ones are 0."""
        counts: dict[str, Any] = {
            f.name: int(float(counters.get(f.name) or 0))
            for f in fields(cls)
            if f.name not in ("raw_rewards_sum", "stopped")
        }
        rewards = float(counters.get("raw_rewards_sum") or 0)
        return cls(**counts, raw_rewards_sum=rewards, stopped=counters.get("stopped", ""))

    def since(self, earlier: TaskProgress) -> TaskProgress:
        """Return the difference to an earlier reading; fields in NO_SUMS keep their value."""
        added: dict[str, Any] = {
            f.name: getattr(self, f.name) - getattr(earlier, f.name)
            for f in fields(self)
            if f.name not in NO_SUMS
        }
        return TaskProgress(**added, **{name: getattr(self, name) for name in NO_SUMS})


@dataclass(frozen=True, slots=True)
class Leftovers:
    """Groups of one task that are in a pool or wait for a worker at this moment."""

    completed: int
    aborted: int
    expired: int
    waiting: int = 0
    expiring: int = 0  # waiting and running groups that can serve no train step any more


@dataclass(frozen=True, slots=True)
class ProduceProgress:
    """One reading of a run, by task. `next_consumer_step` is the train step to take next.

    `awaits` is a taken step for whose missing groups the trainer waits.
    """

    next_consumer_step: int
    tasks: Mapping[str, TaskProgress]
    leftovers: Mapping[str, Leftovers]
    awaits: int | None = None

    def since(self, earlier: ProduceProgress) -> dict[str, TaskProgress]:
        return {task: now.since(earlier.tasks[task]) for task, now in self.tasks.items()}


def _steps(keys: Keys, values: Sequence[bytes | None]) -> list[int]:
    return read_counts(keys.ledger("train"), ["taken", "awaits"], values)


def read_progress(
    store: Store, keys: Keys, thresholds: Mapping[str, int | None]
) -> ProduceProgress:
    """Return the progress of the tasks of `thresholds`, in two round trips. Raises RunDamaged.

    `thresholds`: the stale threshold of each of these tasks; None for one whose groups do not age.
    """
    tasks = list(thresholds)
    # of a batch that is taken meanwhile, fewer groups count as expiring, and too little starts
    steps = ("HMGET", keys.ledger("train"), "taken", "awaits")
    (before,) = store.send("progress", [steps])
    step = next_step(*_steps(keys, before))
    reads: list[Command] = []
    for task, threshold in thresholds.items():
        cut = f"({step - threshold}" if threshold is not None else "-inf"
        reads.append(("ZCOUNT", keys.age(task), "-inf", cut))
        reads.append(("HGETALL", keys.progress(task)))
        reads += [("ZCARD", keys.pool(task, status)) for status in POOLS]
        reads += [("XLEN", keys.jobs(task, lane)) for lane in LANES]
    reads.append(("HMGET", keys.cursors, *tasks))
    # read last: if a batch is taken meanwhile, the newer step is combined with the older counts, so
    # that the producer starts too little rather than too much
    reads.append(steps)
    *rows, cursors, after = store.send("progress", reads)
    width = 2 + len(POOLS) + len(LANES)
    pooled = 2 + len(POOLS)
    parts = {task: rows[i * width : (i + 1) * width] for i, task in enumerate(tasks)}
    counters = {task: text_fields(part[1]) for task, part in parts.items()}
    for task, cursor in zip(tasks, cursors, strict=True):
        counters[task]["cursor"] = str(read_counts(keys.cursors, [task], [cursor])[0])
        require_fields("progress", keys.progress(task), counters[task])
    taken, awaits = _steps(keys, after)
    return ProduceProgress(
        next_consumer_step=taken + 1,
        awaits=awaits or None,
        tasks={task: TaskProgress.parse(counters[task]) for task in tasks},
        leftovers={
            task: Leftovers(
                **dict(zip(POOLS, part[2:pooled], strict=True)),
                waiting=sum(part[pooled:]),
                expiring=part[0],
            )
            for task, part in parts.items()
        },
    )
