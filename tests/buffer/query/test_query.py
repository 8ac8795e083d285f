from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from buffer.errors import ConfigError, QueryError
from buffer.query.language import (
    FALSE,
    FIELDS,
    MAX_DEPTH,
    TRUE,
    Condition,
    allowed_values,
    matches,
    narrow,
    parse,
)
from buffer.query.record import RECORD_FIELDS, STAGES, GroupRecord, Moment
from buffer.wire.rollout import Status
from tests.naive_query import QUERIES, says
from tests.thoroughness import examples

FEW = st.integers(0, 5)
FEW_OR_NONE = st.none() | FEW
TASKS = st.sampled_from(["math", "code"])
STAGE = st.sampled_from(STAGES)
STATUS = st.sampled_from(Status)
OWNERS = st.sampled_from(["w0", "w1", None])
REWARDS = st.sampled_from([None, 0.0, 0.5, 1.0])
TAKEN = 4


@st.composite
def records(draw: st.DrawFn) -> GroupRecord:
    task = draw(TASKS)
    number = draw(FEW)
    version = draw(FEW_OR_NONE)
    return GroupRecord(
        gid=f"{task}-{number:010d}",
        task=task,
        draw=number,
        stage=draw(STAGE),
        status=str(draw(STATUS)),
        version=version,
        staleness=None if version is None else TAKEN - version,
        tries=draw(FEW),
        aborts=draw(FEW),
        owner=draw(OWNERS),
        samples=draw(FEW),
        tokens=draw(FEW),
        size=draw(FEW),
        reward=draw(REWARDS),
        arrival=draw(FEW_OR_NONE),
        time_ms=draw(FEW_OR_NONE),
        batch=None,
    )


def facts(record: GroupRecord) -> dict[str, Any]:
    return {name: getattr(record, field.attribute) for name, field in FIELDS.items()}


@settings(max_examples=examples(400))
@given(QUERIES, st.lists(records(), min_size=1, max_size=5))
def test_queries_mean_what_a_naive_reading_of_them_says(
    query: dict[str, Any], found: list[GroupRecord]
) -> None:
    node = parse(query)
    assert [matches(node, record) for record in found] == [
        says(query, facts(record)) for record in found
    ]
    assert parse(node) is node
    assert parse({"$and": [node]}) == parse({"$and": [query]})


@settings(max_examples=examples(400))
@given(QUERIES, records())
def test_plans_are_never_too_narrow(query: dict[str, Any], record: GroupRecord) -> None:
    """What an index knows of a group excludes it only if the whole query does."""
    node = parse(query)
    known = {"task": record.task, "stage": record.stage, "status": record.status}
    left = narrow(node, known)
    assert matches(left, record) == matches(node, record)
    for name in ("gid", "draw"):
        values = allowed_values(node, name)
        assert values is None or facts(record)[name] in values or not matches(node, record)


def test_edges_of_the_language() -> None:
    assert parse({}) == parse({"$and": []}) == parse({"tries": {}}) == TRUE
    assert parse({"$or": []}) == FALSE
    completed = Condition("status", "$eq", "completed")
    assert parse({"status": Status.COMPLETED}) == parse({"status": "completed"}) == completed
    assert parse({"tries": {"$in": ()}}) == Condition("tries", "$in", frozenset())


class Unlike:
    def __repr__(self) -> str:
        return "unlike"


@pytest.mark.parametrize(
    ("query", "message"),
    [
        (None, "a map of fields, not None"),
        ({"colour": 1}, "no field 'colour'.*fields: task, status"),
        ({1: 1}, "no field 1"),
        ({"time_ms": 1}, "no field 'time_ms'"),
        ({"$not": {}}, r"'\$not' is not allowed here"),
        ({"$eq": 3}, "is not allowed here"),
        ({"$and": {"tries": 1}}, "needs a list"),
        ({"$or": [{"tries": 1}, 3]}, "a map of fields, not 3"),
        ({"tries": {"$like": 1}}, r"no operator '\$like'.*operators: \$eq"),
        ({"tries": {"eq": 1}}, "no operator 'eq'"),
        ({"tries": "1"}, "tries: .eq cannot be '1'.*a finite number"),
        ({"tries": True}, "cannot be True"),
        ({"tries": [1]}, r"cannot be \[1\]"),
        ({"tries": Unlike()}, "cannot be unlike"),
        ({"tokens": float("nan")}, "cannot be nan"),
        ({"reward": {"$lt": float("inf")}}, "cannot be inf"),
        ({"version": {"$gt": None}}, "cannot be None"),
        ({"task": 3}, "a string"),
        ({"task": 10**5000}, "cannot be this int"),
        ({"status": "done"}, "'done'.*one of init, completed"),
        ({"status": {"$in": ["init", "done"]}}, "'done'"),
        ({"status": {"$gt": "init"}}, "needs an order"),
        ({"stage": "lost"}, "one of waiting, running"),
        ({"tries": {"$in": 1}}, "needs a list"),
        ({"tries": {"$not_in": "12"}}, "needs a list"),
        ({"tries": {"$in": [1, "2"]}}, "cannot be '2'"),
        ({"tries": {"$between": [1]}}, "lowest, highest"),
        ({"tries": {"$between": [2, 1]}}, "lowest, highest"),
        ({"version": {"$between": [None, 1]}}, "cannot be None"),
        ({"tries": {"$between": 3}}, "needs a list"),
        ({"$or": [{"tries": 1}, {"tries": {"$gt": "1"}}]}, "cannot be '1'"),
    ],
)
def test_wrong_queries_are_refused_without_reading_data(query: object, message: str) -> None:
    with pytest.raises(QueryError, match=message) as caught:
        parse(query)
    assert caught.value.hint
    assert caught.value.exit_code == ConfigError.exit_code == 2
    assert len(str(caught.value)) < 500


def test_nesting_is_bounded() -> None:
    query: dict[str, Any] = {"tries": 1}
    for _ in range(MAX_DEPTH):
        query = {"$or": [query]}
    assert parse(query)
    with pytest.raises(QueryError, match="nested too deeply"):
        parse({"$and": [query]})
    endless: dict[str, Any] = {}
    endless["$and"] = [endless]
    with pytest.raises(QueryError, match="nested too deeply"):
        parse(endless)


def test_record_counts_staleness_to_the_step_that_took_it() -> None:
    fields = {"stage": "taken", "status": "completed", "version": "3", "batch": "train:5"}
    fields |= {"samples": "4", "reward": "3"}

    def read(**changes: str) -> GroupRecord:
        values = [(fields | changes).get(name, "").encode() for name in RECORD_FIELDS]
        record = GroupRecord.parse("math-0000000007", values, Moment(taken=8, now_ms=1000))
        assert record is not None
        return record

    assert (read().task, read().draw, read().staleness, read().reward) == ("math", 7, 1, 0.75)
    assert read(stage="pool").staleness == read(batch="eval:5").staleness == 5
    assert (
        read(version="").version,
        read(version="").staleness,
        read(status="aborted").reward,
    ) == (None, None, None)
    times = {"entry": "400-0", "claimed_ms": "700", "submitted_ms": "600"}
    assert (read().time_ms, read(**times).time_ms, read(claimed_ms="2000").time_ms) == (
        None,
        300,
        0,
    )
