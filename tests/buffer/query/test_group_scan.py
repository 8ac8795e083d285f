from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings

import buffer.query.scan
from buffer.errors import QueryError
from buffer.query.language import FIELDS
from buffer.query.record import RECORD_FIELDS, STAGES, GroupRecord, Moment
from buffer.wire.rollout import PolicyVersion, Status
from tests.buffer.scene import Scene
from tests.naive_query import QUERIES, says
from tests.thoroughness import examples

NO_TIME = {name: field.attribute for name, field in FIELDS.items() if name != "time"}


def everywhere(scene: Scene) -> None:
    """Make groups of three tasks in every stage, with versions -, 0, 1, 2, 3 and lost leases."""
    scene.open_trainer(lineage="l1")
    scene.ready(1, 0, 2, 0, 3, lineage="l1")
    scene.ready(0, 1, task="code", lineage="l1")
    scene.ready(0, task="quiz", lineage="l1")
    scene.take(1, math=2, code=1)
    scene.enqueue(8)
    for job, status in zip(
        scene.claim(4), (Status.ABORTED,) * 2 + (Status.COMPLETED,) * 2, strict=True
    ):
        scene.submit(
            job, None if status is Status.ABORTED else PolicyVersion("l1", 1), status=status
        )
    for job in scene.claim(2, worker="w1"):
        scene.run.jobs.release("w1", job, "failed", "broken")
    scene.take(2, math=1)


def every_record(scene: Scene) -> dict[str, GroupRecord]:
    moment = Moment(scene.run.ledger.steps()[0], scene.now_ms())
    found = {}
    for key in scene.raw.scan_iter(scene.keys.groups + "*", count=1000):
        gid = key.decode().removeprefix(scene.keys.groups)
        record = GroupRecord.parse(gid, scene.raw.hmget(key, RECORD_FIELDS), moment)
        assert record is not None
        found[gid] = record
    return found


def facts(record: GroupRecord) -> dict[str, Any]:
    return {name: getattr(record, attribute) for name, attribute in NO_TIME.items()}


def without_time(query: Any) -> Any:
    if isinstance(query, list):
        return [without_time(part) for part in query]
    return {k: without_time(v) if k[0] == "$" else v for k, v in query.items() if k != "time"}


def test_indexes_answer_what_a_scan_of_all_records_answers(
    make_scene: Callable[..., Scene],
) -> None:
    scene = make_scene(max_tries=1, stale_threshold=3, on_straggler="retry")
    everywhere(scene)
    scene.run.buffer.refresh_staleness("math")
    found = every_record(scene)
    assert {record.stage for record in found.values()} == {"waiting", "pool", "taken", "dead"}
    scene.claim(1)
    found = every_record(scene)
    assert len(found) == scene.run.groups.count() == len(list(scene.run.groups.find()))

    @settings(max_examples=examples(60), database=None)
    @given(QUERIES)
    def check(query: dict[str, Any]) -> None:
        query = without_time(query)
        expected = sorted(gid for gid, record in found.items() if says(query, facts(record)))
        rows = list(scene.run.groups.find(query))
        assert sorted(row.gid for row in rows) == expected
        assert [facts(row) for row in rows] == [facts(found[row.gid]) for row in rows]
        assert scene.run.groups.count(query) == len(expected)

    check()


def moved_by_hand(scene: Scene) -> None:
    """Quarantine, requeue and drop groups; archive and retain some."""
    run = scene.run
    run.ledger.commit(scene.trainer, 1, 1)
    run.ledger.quarantine(scene.trainer, 2, scene.take(2, math=1).entries[0], "bad")
    aborted = scene.pool("aborted")[0][0]
    completed = scene.pool("completed")[0][0]
    dead = next(letter.gid for letter in run.dead_letters.newest())
    for gid in (aborted, completed, dead):
        run.jobs.requeue(gid)
    run.jobs.drop(scene.pool("completed")[0][0])
    run.jobs.drop(scene.stream("fresh")[0])


@pytest.mark.parametrize("order", ["staleness", "fifo"])
def test_indexes_agree_with_a_scan_after_moves_by_hand(
    make_scene: Callable[..., Scene], order: str
) -> None:
    scene = make_scene(
        max_tries=1, stale_threshold=3, on_straggler="retry", order=order, retain_batches=1
    )
    everywhere(scene)
    moved_by_hand(scene)
    found = every_record(scene)
    assert sorted(row.gid for row in scene.run.groups.find()) == sorted(found)
    for stage in STAGES:
        expected = sorted(gid for gid, record in found.items() if record.stage == stage)
        assert sorted(row.gid for row in scene.run.groups.find({"stage": stage})) == expected
        assert scene.run.groups.count({"stage": stage}) == len(expected)
    again = list(
        scene.run.groups.find({"stage": "waiting", "tries": 0, "tokens": 0, "version": None})
    )
    assert len(again) >= 2
    assert [row.reward for row in again] == [None] * len(again)
    scene.check()


def calls(scene: Scene, *commands: str) -> int:
    counted = scene.run.store.client.info("commandstats")
    return sum(
        int(counted.get(f"cmdstat_{command}", {"calls": 0})["calls"]) for command in commands
    )


@pytest.mark.without("memory", reason="it counts no commands")
def test_counting_a_pool_reads_no_record(scene: Scene) -> None:
    scene.ready(*range(6))
    before = calls(scene, "hmget", "hgetall")
    assert scene.run.groups.count({"status": "completed", "stage": "pool"}) == 6
    # one HMGET for the steps of the ledger
    assert calls(scene, "hmget", "hgetall") == before + 1


def test_groups_of_a_pool_come_by_weights_and_arrival(scene: Scene) -> None:
    gids = scene.ready(2, 0, 1, 0)
    assert [record.gid for record in scene.run.groups.find({"stage": "pool"})] == [
        gids[i] for i in (1, 3, 2, 0)
    ]
    assert [record.gid for record in scene.run.groups.find({}, limit=2)] == [gids[1], gids[3]]
    assert list(scene.run.groups.find({}, limit=0)) == []


def test_groups_can_be_sorted_with_those_without_a_value_last(scene: Scene) -> None:
    gids = scene.ready(2, 0, 1)
    scene.enqueue(1)
    waiting = "math-0000000003"
    ascending = [record.gid for record in scene.run.groups.find({}, order="version", limit=9)]
    assert ascending == [gids[1], gids[2], gids[0], waiting]
    descending = [record.gid for record in scene.run.groups.find({}, order="-version", limit=9)]
    assert descending == [gids[0], gids[2], gids[1], waiting]
    assert [r.gid for r in scene.run.groups.find({"task": "math"}, order="-draw", limit=1)] == [
        waiting
    ]


@pytest.mark.parametrize(
    ("query", "options"),
    [
        ({"colour": 1}, {}),
        ({}, {"order": "colour", "limit": 1}),
        ({}, {"order": "draw"}),
        ({}, {"limit": -1}),
    ],
)
def test_wrong_questions_are_refused_before_the_first_record(
    scene: Scene, query: dict[str, Any], options: dict[str, Any]
) -> None:
    with pytest.raises(QueryError):
        scene.run.groups.find(query, **options)


@pytest.mark.parametrize("taken", [1, 3, 7])
def test_groups_taken_while_a_pool_is_read_hide_no_other(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, taken: int
) -> None:
    monkeypatch.setattr(buffer.query.scan, "KEYS_PER_TRIP", 3)
    gids = scene.ready(*[0] * 12)
    scene.open_trainer()
    found = scene.run.groups.find({"stage": "pool"})
    first = next(found)
    scene.take(1, math=taken)
    rest = [record.gid for record in found]
    assert {first.gid, *rest} >= {gids[0], *gids[max(3, taken) :]}
    assert len(set(rest)) == len(rest)


def test_a_removed_anchor_among_equals_does_not_stop_the_walk(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buffer.query.scan, "KEYS_PER_TRIP", 2)
    gids = scene.ready(*[0] * 9)
    found = scene.run.groups.find({"stage": "pool"})
    seen = [next(found).gid for _ in range(5)]
    # the walk stands behind the sixth; it goes, those before it stay
    pool = scene.keys.pool("math", "completed")
    scene.raw.zrem(pool, scene.raw.zrange(pool, 5, 5)[0])
    assert seen + [record.gid for record in found] == gids


def test_gids_are_looked_up_and_never_searched_for(scene: Scene) -> None:
    gids = scene.ready(0, 0, 0)
    before = calls(scene, "zrange", "xrange", "lrange")
    query = {"gid": {"$in": [gids[2], gids[0], "math-0000000099", "no gid", "math-*"]}}
    assert [record.gid for record in scene.run.groups.find(query)] == [gids[0], gids[2]]
    assert [record.gid for record in scene.run.groups.find({"draw": 1})] == [gids[1]]
    assert scene.run.groups.count({"draw": {"$in": [1, 2.5, -1, 10**400]}, "task": "math"}) == 1
    assert calls(scene, "zrange", "xrange", "lrange") == before
