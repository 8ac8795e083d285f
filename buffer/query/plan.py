"""Plan a query: what an index answers of it before any record is read.

A pool knows the task, stage and status of its groups: `narrow` replaces these in the query. The
rest is false (skip the index), a range of versions, by which a pool is sorted, or more. An answer
may be too wide, never too narrow: in the end every record is matched against the whole query.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from buffer.query.language import FALSE, TRUE, AllOf, AnyOf, Condition, Node, Scalar

MAX_VERSION = 2**53  # scores of sorted sets are exact below it


class VersionRange(NamedTuple):
    """Versions from `low` to `high`, both included; infinite `high` includes groups without one."""

    low: float
    high: float

    @property
    def is_empty(self) -> bool:
        return self.low > self.high


EVERY = VersionRange(-math.inf, math.inf)
NOTHING = VersionRange(1, 0)


def narrow(node: Node, known: Mapping[str, Scalar]) -> Node:
    """Return the rest of a query when some fields are known: TRUE or FALSE if nothing is left."""
    if isinstance(node, Condition):
        if node.field not in known:
            return node
        return TRUE if node.holds(known[node.field]) else FALSE
    # in AllOf, TRUE adds nothing and FALSE decides; in AnyOf, the reverse
    neutral, deciding = (TRUE, FALSE) if isinstance(node, AllOf) else (FALSE, TRUE)
    left = [part for part in (narrow(part, known) for part in node.parts) if part != neutral]
    if deciding in left:
        return deciding
    return left[0] if len(left) == 1 else type(node)(tuple(left))


def allowed_values(node: Node, field: str) -> frozenset[Any] | None:
    """Return the only values of a field that can match; None if the query does not name them."""
    match node:
        case Condition(name, "$eq", value) if name == field:
            return frozenset([value])
        case Condition(name, "$in", values) if name == field:
            return frozenset(values)
        case AllOf(parts):
            named = [values for values in _values_of(parts, field) if values is not None]
            return frozenset.intersection(*named) if named else None
        case AnyOf(parts):
            # a part that names no values lets any value match
            named = [values for values in _values_of(parts, field) if values is not None]
            return frozenset().union(*named) if len(named) == len(parts) else None
    return None


def _values_of(parts: tuple[Node, ...], field: str) -> list[frozenset[Any] | None]:
    return [allowed_values(part, field) for part in parts]


def version_range(node: Node, taken: int) -> VersionRange:
    """Return the versions in pools that can match; staleness there is `taken - version`."""
    match node:
        case Condition("version"):
            return _clamped(*_integers(node))
        case Condition("staleness"):
            low, high = _integers(node)
            return _clamped(taken - high, taken - low)
        case AllOf(parts):
            ranges = [EVERY, *(version_range(part, taken) for part in parts)]
            return VersionRange(max(r.low for r in ranges), min(r.high for r in ranges))
        case AnyOf(parts):
            wanted = [r for r in (version_range(part, taken) for part in parts) if not r.is_empty]
            if not wanted:
                return NOTHING
            return VersionRange(min(r.low for r in wanted), max(r.high for r in wanted))
    return EVERY


def is_exact(node: Node) -> bool:
    """Return whether `version_range` is the whole query, so that counting needs no records."""
    match node:
        case Condition("version" | "staleness", op, operand):
            return op in _BOUNDS and operand is not None
        case AllOf(parts):
            return all(is_exact(part) for part in parts)
    return False


_BOUNDS: Mapping[str, Callable[[Any], tuple[float, float]]] = {
    "$eq": lambda x: (math.ceil(x), math.floor(x)),
    "$gt": lambda x: (math.floor(x) + 1, MAX_VERSION),
    "$gte": lambda x: (math.ceil(x), MAX_VERSION),
    "$lt": lambda x: (-MAX_VERSION, math.ceil(x) - 1),
    "$lte": lambda x: (-MAX_VERSION, math.floor(x)),
    "$between": lambda ends: (math.ceil(ends[0]), math.floor(ends[1])),
}
"""Lowest and highest integer that match. All but $eq null exclude groups without a version."""


def _integers(condition: Condition) -> tuple[float, float]:
    operand = condition.operand
    if condition.operator == "$in" and None not in operand:
        return (math.ceil(min(operand)), math.floor(max(operand))) if operand else NOTHING
    if condition.operator not in _BOUNDS or operand is None:
        return EVERY
    return _BOUNDS[condition.operator](operand)


def _clamped(low: float, high: float) -> VersionRange:
    if high == math.inf:
        return EVERY
    if low > high:
        return NOTHING
    return VersionRange(_near(low), _near(high))


def _near(bound: float) -> float:
    return max(-MAX_VERSION, min(MAX_VERSION, bound))
