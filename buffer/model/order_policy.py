"""The order in which ready groups are taken: a policy of the run, the same for all processes (in
the run's meta).

    staleness     the oldest weights first, then by arrival (the pool's own order; the default)
    freshest      the newest weights first, the newest arrival first (the pool, read backwards)
    fifo          by arrival, whatever made them
    length_fair   lengths take turns: see `bucket`
    module:name   a function of yours: the lower its score, the earlier; equal ones by arrival

The first two need nothing but the pool. The others have an index beside it,
`order:<task>:completed`; its score is settled at submit or import, on the client's side, and never
changes. No policy hands out what is too stale (I8), and no Lua knows one that is not listed here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from buffer.errors import ConfigError
from buffer.model.dotted_path import load_object
from buffer.model.group import RolloutGroup
from buffer.model.ids import split_group_id

BUILT_IN = ("staleness", "fifo", "freshest", "length_fair")


@dataclass(frozen=True, slots=True)
class Finished:
    """What a policy may look at. `tokens`: all response tokens; `longest`: of one rollout;
    `reward`: mean score, None without any; `version`: of the oldest weights as the worker knows
    them, None where nothing was sampled.
    """

    gid: str
    task: str
    draw: int
    samples: int
    tokens: int
    longest: int
    reward: float | None
    version: int | None

    @classmethod
    def of(cls, group: RolloutGroup) -> Finished:
        scores = group.scores[np.isfinite(group.scores)]
        oldest = group.oldest()
        return cls(
            gid=group.gid,
            task=group.task,
            draw=split_group_id(group.gid)[1],
            samples=len(group),
            tokens=int(group.lengths.sum()),
            longest=int(group.lengths.max()),
            reward=float(scores.mean()) if len(scores) else None,
            version=oldest.version if oldest else None,
        )


OrderFunction = Callable[[Finished], float]
"""A policy of a user: a finite score, the lowest is taken first."""


def is_custom(order: str) -> bool:
    """Whether the policy is a function that has to be loaded."""
    return order not in BUILT_IN


def load_order(order: str, named: str) -> OrderFunction | None:
    """The function of a user's order policy; None for those that are listed above. Raises
    ConfigError.

    `order` is what the run says, and so the server: it is imported only if the user's own config or
    command `named` it.
    """
    if not is_custom(order):
        return None
    if order != named:
        raise ConfigError(
            f"the run takes groups in the order of {order!r}, which nobody here has named",
            hint=f"if you trust that code: [policy] order = {order!r} in the config of this process; import: --order",
        )
    function: OrderFunction = load_object(order, kind="order policy", built_in=BUILT_IN)
    return function


def bucket(group: RolloutGroup) -> int:
    """The length class of a group: the power of two below its longest response (0 for none).

    In `length_fair` the buckets take turns, by self-clocked fair queueing: the n-th waiting group
    of a bucket gets round n after the one last taken. Long responses finish late, made by old
    weights, and are few; behind a crowd of short ones they would expire, and the model would learn
    from short ones only. Here each waits for one turn of its bucket at most. It costs one counter
    per bucket, and no search.
    """
    return int(group.lengths.max()).bit_length()


def submit_argument(order: str, group: RolloutGroup, function: OrderFunction | None) -> str:
    """What scripts are told of a completed group's place: "" (no index), "arrival", "bucket:<n>",
    or a score.
    """
    match order:
        case "staleness" | "freshest":
            return ""
        case "fifo":
            return "arrival"
        case "length_fair":
            return f"bucket:{bucket(group)}"
    if function is None:
        raise ConfigError(
            f"the run's order policy {order!r} is not loaded",
            hint="set ReplayBuffer.order_function",
        )
    score = float(function(Finished.of(group)))
    if not math.isfinite(score):
        raise ConfigError(
            f"the order policy {order!r} gave {score} for {group.gid}",
            hint="return a finite number",
        )
    return repr(score)
