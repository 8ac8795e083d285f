"""Random queries and the plainest reading of them, straight from the dict: what `buffer.query` must
agree with.
"""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from buffer.query.record import STAGES
from buffer.wire.rollout import Status

NUMBERS = (
    "staleness", "version", "draw", "tries", "aborts", "samples", "tokens", "size", "reward",
    "arrival", "time",
)  # fmt: skip
MISSING = ("staleness", "version", "reward", "arrival", "time", "owner")

SMALL = st.integers(-3, 8) | st.sampled_from([0.5, 2.0, -1.5, 1e300, 2**60, -(2**60)])
TEXTS = {
    "task": st.sampled_from(["math", "code", "quiz", "none"]),
    "owner": st.sampled_from(["w0", "w1", "x"]),
    "gid": st.builds(
        lambda task, draw: f"{task}-{draw:010d}",
        st.sampled_from(["math", "code"]),
        st.integers(0, 12),
    ),
    "status": st.sampled_from(list(Status)) | st.sampled_from([str(status) for status in Status]),
    "stage": st.sampled_from(STAGES),
}


def says(query: dict[str, Any], record: dict[str, Any]) -> bool:
    """What the language means, written as plainly as possible."""
    return all(_entry(name, value, record) for name, value in query.items())


def _entry(name: str, value: Any, record: dict[str, Any]) -> bool:
    if name == "$and":
        return all(says(part, record) for part in value)
    if name == "$or":
        return any(says(part, record) for part in value)
    conditions = value if isinstance(value, dict) else {"$eq": value}
    return all(_compare(record[name], each, operand) for each, operand in conditions.items())


def _compare(value: Any, each: str, operand: Any) -> bool:
    if each in ("$eq", "$ne"):
        return (value == operand) is (each == "$eq")
    if each in ("$in", "$not_in"):
        return any(value == item for item in operand) is (each == "$in")
    if value is None:
        return False
    if each == "$between":
        return bool(operand[0] <= value) and bool(value <= operand[1])
    signs = {
        "$gt": value > operand,
        "$gte": value >= operand,
        "$lt": value < operand,
        "$lte": value <= operand,
    }
    return bool(signs[each])


def _operands(name: str) -> dict[str, st.SearchStrategy[Any]]:
    """What may follow each operator, and under "" what may stand without one."""
    plain = SMALL if name in NUMBERS else TEXTS[name]
    any_value = plain | st.none() if name in MISSING else plain
    several = st.lists(any_value, max_size=4)
    operands: dict[str, st.SearchStrategy[Any]] = {
        **dict.fromkeys(("", "$eq", "$ne"), any_value),
        **dict.fromkeys(("$in", "$not_in"), several),
    }
    if name not in ("status", "stage"):
        operands |= dict.fromkeys(("$gt", "$gte", "$lt", "$lte"), plain)
        operands["$between"] = st.tuples(plain, plain).map(sorted)
    return operands


# made once: to make and check strategies takes longer than to draw from them
OPERANDS = {name: _operands(name) for name in (*NUMBERS, *TEXTS)}
OPERATORS = {
    name: st.lists(st.sampled_from(sorted(operands.keys() - {""})), max_size=2)
    for name, operands in OPERANDS.items()
}
NAMES = st.lists(st.sampled_from([*OPERANDS]), max_size=2, unique=True)
BOOLEANS = st.booleans()


@st.composite
def _leaves(draw: st.DrawFn) -> dict[str, Any]:
    return {name: _condition(draw, name) for name in draw(NAMES)}


def _condition(draw: st.DrawFn, name: str) -> Any:
    operands = OPERANDS[name]
    if draw(BOOLEANS):
        return draw(operands[""])
    return {operator: draw(operands[operator]) for operator in draw(OPERATORS[name])}


LEAVES = _leaves()


def _combined(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    several = st.lists(inner, max_size=3)
    return st.builds(lambda parts, leaf: {"$and": parts} | leaf, several, LEAVES) | st.builds(
        lambda parts, leaf: {"$or": parts} | leaf, several, LEAVES
    )


QUERIES: st.SearchStrategy[dict[str, Any]] = st.recursive(LEAVES, _combined, max_leaves=8)
