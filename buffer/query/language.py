"""The query language (XTuner's): a dict becomes a small typed tree, which matches a record or not.

    {"status": "completed", "staleness": {"$gte": 2}}
    {"$or": [{"task": "math"}, {"tokens": {"$between": [1, 99]}}]}
    {}

Entries are ANDed; a plain value means $eq; $and and $or hold lists, and nest. An empty $and, {} and
{"tries": {}} are true, an empty $or is false. A value that a group lacks is None: it equals only
None, and is neither above nor below anything. `parse` finds every error in a query.

An index knows some fields of its groups, such as task, stage and status: `narrow` replaces these in
a query, before any record is read.
"""

from __future__ import annotations

import math
import operator
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast

from buffer.errors import QueryError
from buffer.query.record import STAGES, GroupRecord
from buffer.wire.rollout import Status

MAX_DEPTH = 32  # levels of $and and $or

Scalar = str | int | float | None


class Field(NamedTuple):
    """A field of queries; `choices` are all values of a field that has no order."""

    attribute: str
    kind: Literal["text", "number"]
    may_be_missing: bool = False
    choices: tuple[str, ...] = ()


FIELDS: Mapping[str, Field] = {
    "task": Field("task", "text"),
    "status": Field("status", "text", choices=tuple(str(status) for status in Status)),
    "stage": Field("stage", "text", choices=STAGES),
    "staleness": Field("staleness", "number", may_be_missing=True),
    "version": Field("version", "number", may_be_missing=True),
    "gid": Field("gid", "text"),
    "draw": Field("draw", "number"),
    "tries": Field("tries", "number"),
    "aborts": Field("aborts", "number"),
    "owner": Field("owner", "text", may_be_missing=True),
    "samples": Field("samples", "number"),
    "tokens": Field("tokens", "number"),
    "size": Field("size", "number"),
    "reward": Field("reward", "number", may_be_missing=True),
    "arrival": Field("arrival", "number", may_be_missing=True),
    "time": Field("time_ms", "number", may_be_missing=True),
}

# false where a group has no value
ORDERINGS: Mapping[str, Callable[[Any, Any], bool]] = {
    "$gt": operator.gt,
    "$gte": operator.ge,
    "$lt": operator.lt,
    "$lte": operator.le,
    "$between": lambda value, ends: bool(ends[0] <= value <= ends[1]),
}

EQUALITIES: Mapping[str, Callable[[Any, Any], bool]] = {
    "$eq": operator.eq,
    "$ne": operator.ne,
    "$in": lambda value, members: value in members,
    "$not_in": lambda value, members: value not in members,
}

OPERATORS = (*EQUALITIES, *ORDERINGS)


@dataclass(frozen=True, slots=True)
class Condition:
    """Compares a field with a scalar, a frozenset ($in, $not_in) or both ends ($between)."""

    field: str
    operator: str
    operand: Any

    def holds(self, value: Scalar) -> bool:
        if equality := EQUALITIES.get(self.operator):
            return equality(value, self.operand)
        return value is not None and ORDERINGS[self.operator](value, self.operand)


@dataclass(frozen=True, slots=True)
class AllOf:
    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class AnyOf:
    parts: tuple[Node, ...]


Node = Condition | AllOf | AnyOf
TRUE = AllOf(())
FALSE = AnyOf(())


def parse(query: object) -> Node:
    """Return the tree of a query (a dict, or a tree that was parsed before). Raises QueryError."""
    return _expression(query, 0)


def matches(node: Node, record: GroupRecord) -> bool:
    """Return whether a record matches a parsed query. Never raises."""
    match node:
        case Condition():
            return node.holds(getattr(record, FIELDS[node.field].attribute))
        case AllOf():
            return all(matches(part, record) for part in node.parts)
        case AnyOf():
            return any(matches(part, record) for part in node.parts)


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


def field_of(name: object) -> Field:
    """Return the field of that name. Raises QueryError, which lists the fields."""
    field = FIELDS.get(name) if isinstance(name, str) else None
    if field is None:
        raise QueryError(f"there is no field {_show(name)}", hint=f"fields: {', '.join(FIELDS)}")
    return field


# -- parsing -----------------------------------------------------------------


def _expression(query: object, depth: int) -> Node:
    if isinstance(query, Condition | AllOf | AnyOf):
        return query
    if depth > MAX_DEPTH:
        raise QueryError(
            "a query is nested too deeply", hint=f"at most {MAX_DEPTH} levels of $and and $or"
        )
    if not isinstance(query, dict):
        raise QueryError(
            f"a query is a map of fields, not {_show(query)}", hint='as in {"status": "completed"}'
        )
    return _all_of([_entry(name, value, depth) for name, value in query.items()])


def _all_of(parts: list[Node]) -> Node:
    return parts[0] if len(parts) == 1 else AllOf(tuple(parts))


def _entry(name: object, value: object, depth: int) -> Node:
    if name in ("$and", "$or"):
        if not isinstance(value, list):
            raise QueryError(
                f"{name} needs a list of queries, not {_show(value)}", hint='{"$or": [{…}, {…}]}'
            )
        parts = tuple(_expression(part, depth + 1) for part in value)
        return AllOf(parts) if name == "$and" else AnyOf(parts)
    if isinstance(name, str) and name.startswith("$"):
        raise QueryError(
            f"{_show(name)} is not allowed here",
            hint="use a field, $and or $or; operators belong to a field",
        )
    field = field_of(name)
    conditions = value if isinstance(value, dict) else {"$eq": value}
    return _all_of(
        [_condition(str(name), field, each, operand) for each, operand in conditions.items()]
    )


def _condition(name: str, field: Field, op: object, operand: object) -> Condition:
    if not isinstance(op, str) or op not in OPERATORS:
        raise QueryError(
            f"{name}: there is no operator {_show(op)}", hint=f"operators: {', '.join(OPERATORS)}"
        )
    if op in ORDERINGS and field.choices:
        raise QueryError(
            f"{name}: {op} needs an order, and {name} has none", hint=", ".join(EQUALITIES)
        )
    where = f"{name}: {op}"
    if op in ("$in", "$not_in"):
        return Condition(
            name, op, frozenset(_scalar(where, field, each) for each in _list(where, operand))
        )
    if op == "$between":
        ends = [_scalar(where, field, end, is_ordered=True) for end in _list(where, operand)]
        if len(ends) != 2 or ORDERINGS["$gt"](ends[0], ends[1]):
            raise QueryError(
                f"{where} needs [lowest, highest], not {_show(operand)}",
                hint="both ends are included",
            )
        return Condition(name, op, tuple(ends))
    return Condition(name, op, _scalar(where, field, operand, is_ordered=op in ORDERINGS))


def _list(where: str, value: object) -> list[object]:
    if not isinstance(value, list | tuple):
        raise QueryError(
            f"{where} needs a list of values, not {_show(value)}", hint='as in {"$in": [1, 2]}'
        )
    return list(value)


def _scalar(where: str, field: Field, value: object, *, is_ordered: bool = False) -> Scalar:
    if value is None and field.may_be_missing and not is_ordered:
        return None
    if field.choices and (not isinstance(value, str) or value not in field.choices):
        raise QueryError(
            f"{where} cannot be {_show(value)}", hint=f"one of {', '.join(field.choices)}"
        )
    if field.kind == "text" and isinstance(value, str):
        return str(value)
    # True is an int to Python, and NaN has no order
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if field.kind == "number" and is_number and -math.inf < cast(float, value) < math.inf:
        return cast(float, value)
    kinds = {"text": "a string", "number": "a finite number"}[field.kind]
    missing = ", or null for a missing value" if field.may_be_missing and not is_ordered else ""
    raise QueryError(f"{where} cannot be {_show(value)}", hint=f"{kinds}{missing}")


def _show(value: object) -> str:
    try:
        return reprlib.repr(value)
    except ValueError:  # Python writes no integer of more than 4,300 digits
        return f"this {type(value).__name__}"
