"""The order in which completed groups are taken: a policy of the run, kept in its meta.

    staleness     the oldest weights first, then by arrival (the pool's own order; the default)
    freshest      the newest weights first, the newest arrival first (the pool, read backwards)
    fifo          by arrival, regardless of the policy version
    length_fair   short and long responses alternate: see `bucket`
    module:name   a function of yours: the lower its score, the earlier; equal ones by arrival

All but the first two have an index, `order:<task>:completed`, whose scores the client computes at
submit or import and never changes. No policy returns groups that are too stale (I8).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from buffer.errors import ConfigError
from buffer.ids import split_group_id
from buffer.imports import load_object
from buffer.limits import ORDERS
from buffer.wire.group import RolloutGroup


@dataclass(frozen=True, slots=True)
class Finished:
    """What an order policy knows of a group.

    `longest`: tokens of the longest rollout. `reward`: mean score or None. `version`: of the oldest
    weights as the worker knows them, None where nothing was sampled.
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
"""A policy of the user: it returns a finite score, and the lowest is taken first."""


def load_order(order: str, named: str) -> OrderFunction | None:
    """Return the function of a user's order policy; None for a built-in one.

    `order` comes from the server. It is imported only if the user's config or command `named` it;
    otherwise, raises ConfigError.
    """
    if order in ORDERS:
        return None
    if order != named:
        raise ConfigError(
            f"the run orders groups by {order!r}, which this process was not configured with",
            hint=f"if you trust that code, set [policy] order = {order!r} in the config of this "
            "process; for an import, set run.buffer.order_function",
            command_hint=f"if you trust that code, set [policy] order = {order!r} in the config of "
            "this process; for an import, give --order",
        )
    function: OrderFunction = load_object(order, kind="order policy", built_in=ORDERS)
    return function


def bucket(group: RolloutGroup) -> int:
    """Return the length class of a group: the power of two below its longest response (0: none).

    `length_fair` takes from buckets in turn (self-clocked fair queueing): the n-th waiting group
    of a bucket gets round n after the one last taken. Otherwise, long responses, which finish late,
    would expire behind many short ones, and the model would learn from short ones only.
    """
    return int(group.lengths.max()).bit_length()


def submit_argument(order: str, group: RolloutGroup, function: OrderFunction | None) -> str:
    """Return the order argument of scripts: "" (no index), "arrival", "bucket:<n>" or a score."""
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
            hint="set ReplayBuffer.order_function to load_order(…)",
        )
    try:
        score = float(function(Finished.of(group)))
    except (Exception, SystemExit) as error:  # of the user's code: it is this group's failure
        raise ConfigError(
            f"the order policy {order!r} raised {type(error).__name__} for {group.gid}: {error}",
            hint="return a finite number",
        ) from error
    if not math.isfinite(score):
        raise ConfigError(
            f"the order policy {order!r} returned {score} for {group.gid}",
            hint="return a finite number",
        )
    return repr(score)
