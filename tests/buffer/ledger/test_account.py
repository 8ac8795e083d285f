"""fsck finds what is wrong: each fault is planted by hand (I1)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from buffer.ids import group_id
from buffer.ledger.account import FsckReport
from buffer.redis.key_fields import Damage, lasting
from buffer.redis.key_table import TOKEN_ROWS
from buffer.wire.rollout import Status
from tests.buffer.scene import Scene

WAITING, RUNNING, READY, ABORTED, TAKEN, ARCHIVED, FILTERED, DEAD, DROPPED, SKIPPED = (
    group_id("math", i) for i in range(10)
)


@pytest.fixture
def busy(make_scene: Callable[..., Scene]) -> Scene:
    scene = make_scene(max_tries=1)
    scene.open_trainer()
    scene.enqueue(10, samples=[2] * 8 + [0, 2])
    jobs = {job.gid: job for job in scene.claim(9)}
    scene.run.jobs.release("w0", jobs[SKIPPED], "skipped", "no page")
    scene.run.jobs.release("w0", jobs[WAITING], "handback")
    scene.submit(jobs[ABORTED], status=Status.ABORTED)
    scene.submit(jobs[FILTERED], filtered=True)
    scene.run.jobs.release("w0", jobs[DEAD], "failed")
    scene.submit(jobs[ARCHIVED])
    scene.take(1)
    scene.submit(jobs[TAKEN])
    scene.take(2)
    scene.run.ledger.commit(scene.trainer, 2, 1)
    scene.submit(jobs[READY])
    scene.check()
    return scene


def audit(scene: Scene) -> FsckReport:
    found = scene.run.account.fsck()
    assert not found.clean
    return found


def member(scene: Scene, gid: str) -> str:
    return f"{scene.record(gid)['arrival']}:{gid}"


def test_tokens_of_more_groups_than_are_read_are_one_row(
    busy: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    for worker, tokens in {"w0": 7, "w1": 20, "w2": 300, "w3": 4000}.items():
        busy.beat([], worker, sampled=f"math={tokens}:0:0:0")
    for most, stages in (
        (2, {"waiting", "running", "pool", "taken"}),
        (1, {"in_groups", "running"}),
    ):
        monkeypatch.setattr("buffer.ledger.tokens.MOST_GROUPS", most)
        account = busy.run.account.tokens()["math"]
        assert account.table.keys() - set(TOKEN_ROWS) == stages
        assert sum(account.table.values()) == account.total
        assert account.table["running"] == 4327


def test_account_names_every_place(busy: Scene) -> None:
    stages = [busy.run.account.stages("math", i) for i in range(10)]
    assert stages == [
        ["waiting"], ["running"], ["pool"], ["pool"], ["taken"], ["archived"], ["filtered"],
        ["dead"], ["dropped"], ["skipped"],
    ]  # fmt: skip
    task = busy.run.account.totals().tasks[0]
    once = {name: 1 for name in task.stages if name != "expired"}
    assert task.stages == once | {"expired": 0}
    assert (task.enqueued, task.cursor, task.consumed) == (10, 10, 2)


def test_fsck_separates_entries_of_two_lanes_that_have_the_same_id(scene: Scene) -> None:
    """Streams number entries by the millisecond, each for itself."""
    scene.enqueue(2)
    fresh = group_id("math", 0)
    resumed = group_id("math", 1)
    line = scene.keys.jobs("math", "resume")
    entry = scene.record(fresh)["entry"]
    other = scene.record(resumed)["entry"]
    ((_, fields),) = scene.raw.xrange(scene.keys.jobs("math", "fresh"), other, other)
    scene.raw.xdel(scene.keys.jobs("math", "fresh"), other)
    scene.raw.xadd(line, fields, id=entry)
    scene.raw.hset(scene.keys.group(resumed), mapping={"entry": entry, "lane": "resume"})
    scene.check()
    scene.raw.xdel(line, entry)
    assert scene.run.account.fsck().lost == [resumed]


@pytest.mark.parametrize("pool", ["aborted", "expired"])
def test_fsck_finds_a_group_in_two_pools(busy: Scene, pool: str) -> None:
    busy.raw.zadd(busy.keys.pool("math", pool), {member(busy, READY): 0})
    found = audit(busy)
    assert found.doubled == [f"{READY} (pool, pool)"]
    assert found.faults == [
        "math: 10 enqueued, but 11 in all stages",
        f"{busy.keys.pool('math', pool)} has '{READY}', and no record says so",
    ]


def test_fsck_finds_a_waiting_group_that_also_runs(busy: Scene) -> None:
    busy.raw.hset(busy.keys.leased("w0"), WAITING, "t")
    busy.raw.hset(busy.keys.group(WAITING), mapping={"owner": "w0", "token": "t"})
    assert audit(busy).doubled == [f"{WAITING} (waiting, running)"]


def test_fsck_finds_a_group_in_two_batches_and_one_that_is_ready_though_taken(busy: Scene) -> None:
    entry = busy.raw.lindex(busy.keys.batch("train", 2), 1)
    busy.raw.rpush(busy.keys.batch("eval", 1), b"step=1", entry, READY.encode() + b" t 1 1 - 2 -")
    busy.raw.hset(busy.keys.ledger("eval"), "taken", 1)
    doubled = audit(busy).doubled
    assert f"{READY} (batch 1 of eval; pool)" in doubled
    busy.raw.rpush(busy.keys.batch("train", 2), entry)
    assert f"{TAKEN} (in 2 batches)" in audit(busy).doubled


def test_fsck_finds_a_counter_that_is_wrong(busy: Scene) -> None:
    counted = ("enqueued", "cursor", "running", "taken", "archived", "dead", "filtered", "dropped",
               "skipped")  # fmt: skip
    for field in counted:
        for by in (1, -1):
            busy.raw.hincrby(busy.keys.progress("math"), field, by)
            assert busy.run.account.totals().faults, (field, by)
            busy.raw.hincrby(busy.keys.progress("math"), field, -by)
    busy.check()


@pytest.mark.parametrize("at_once", [1, 2, 4, 9, 10])
def test_fsck_finds_the_same_whatever_it_asks_in_one_round_trip(
    busy: Scene, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("buffer.ledger.stages.GROUPS_PER_CALL", at_once)
    busy.raw.script_flush()
    busy.raw.zrem(busy.keys.pool("math", "completed"), member(busy, READY))
    busy.raw.zadd(busy.keys.dead, {TAKEN: 1})
    found = audit(busy)
    assert (found.checked, found.lost) == (10, [READY])
    assert found.doubled == [f"{TAKEN} (taken, dead)", f"{TAKEN} (batch 2 of train; taken, dead)"]


def test_a_fault_that_is_gone_when_its_keys_are_read_again_was_a_move() -> None:
    moved, wrong = Damage("a move", "key", "math-0000000001"), Damage("a fault", "key")
    again = Damage("the same fault, with newer numbers", "key")
    readings = iter([[moved, wrong], [again], [again]])
    assert lasting(lambda: next(readings)) == [again]
