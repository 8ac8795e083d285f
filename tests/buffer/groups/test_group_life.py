"""The life of a group, inspected with plain Redis commands after every step (I1, I2, I11)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buffer.errors import GroupHeld, PayloadMissing, WireError
from buffer.groups.job_queue import Serves, serving_order
from buffer.ids import group_id
from buffer.job import PayloadRef
from buffer.limits import RunLimits, TaskLimits
from buffer.redis.store import Store
from buffer.wire.group import RolloutGroup
from buffer.wire.rollout import Status
from rolloutmq.views.explain.shares import shares_of
from rolloutmq.views.run_view import read_run_view
from tests.buffer.scene import FIRST, Scene, extend, rollout

GID = group_id("math", 0)


def test_rollouts_without_an_answer_and_truncated_ones_are_counted(scene: Scene) -> None:
    scene.enqueue(3)
    for filtered, job in zip((False, True, False), scene.claim(3), strict=True):
        group = extend(scene.run.buffer.read(job.payload), Status.COMPLETED, FIRST)
        for state, unparsed in zip(group.states, (1.0, 0.0), strict=True):
            state.reward = {"score": 0.0, "unparsed": unparsed}
            state.finish_reason = "length"
        group = RolloutGroup(group.gid, group.task, group.states)
        scene.run.buffer.submit("w0", job, group, 4, filtered=filtered)
        scene.run.buffer.submit("w0", job, group, 4, filtered=filtered)  # again, as a lost reply
    counters = scene.counters()
    assert (counters["unparsed"], counters["raw_rewards_count"]) == ("3", "6")
    (task,) = [each for each in read_run_view(scene.run).tasks if each.account.task == "math"]
    assert {each.name: (each.number, each.total) for each in shares_of(task)} == {
        "unparsed": (3, 6), "truncated": (6, 6), "filtered": (1, 3),
    }  # fmt: skip
    scene.check()


def test_submit_of_damaged_groups_is_refused_before_the_upload(scene: Scene) -> None:
    scene.enqueue(1)
    (job,) = scene.claim()
    group = extend(scene.run.buffer.read(job.payload), Status.COMPLETED, FIRST)
    group.states[0].logprobs = group.states[0].logprobs * float("nan")
    with pytest.raises(WireError, match="logprobs"):
        scene.run.buffer.submit("w0", job, RolloutGroup(job.gid, job.task, group.states), 4)
    assert scene.raw.exists(scene.keys.payload(GID, job.token)) == 0
    assert scene.record(GID)["stage"] == "running"


@pytest.mark.parametrize("status", [Status.INIT, Status.FAILED, Status.EXPIRED])
def test_submit_takes_only_results(scene: Scene, status: Status) -> None:
    scene.enqueue(1)
    (job,) = scene.claim()
    with pytest.raises(WireError, match=status.value):
        scene.submit(job, status=status)


def test_large_group_is_stored_in_chunks_and_all_of_them_are_freed(scene: Scene) -> None:
    scene.enqueue(1)
    (job,) = scene.claim()
    group = extend(scene.run.buffer.read(job.payload), Status.COMPLETED, FIRST)
    group.states[0].response = "x" * 2_500_000
    scene.run.buffer.submit("w0", job, RolloutGroup(job.gid, job.task, group.states), 4)
    sizes = [scene.raw.strlen(scene.keys.payload(GID, job.token, chunk)) for chunk in range(5)]
    assert sizes[:2] == [1_048_000] * 2
    assert 0 < sizes[2] < 1_048_000
    assert sizes[4] == 0
    scene.open_trainer()
    entry = scene.take(1).entries[0]
    assert (entry.payload.size, entry.payload.chunks) == (sum(sizes), 5 - sizes.count(0))
    assert len(scene.run.buffer.read(entry.payload).states[0].response) == 2_500_000
    scene.raw.unlink(scene.keys.payload(GID, job.token, 1))
    with pytest.raises(PayloadMissing, match=f"1 of {entry.payload.chunks}"):
        scene.run.buffer.read(entry.payload)
    scene.run.ledger.commit(scene.trainer, 1, 1)
    scene.run.janitor.sweep()
    assert list(scene.raw.scan_iter(scene.keys.payload(GID, "*"))) == []


def test_bytes_that_changed_on_their_way_are_reported(scene: Scene) -> None:
    (gid,) = scene.ready(0)
    scene.open_trainer()
    entry = scene.take(1).entries[0]
    key = scene.keys.payload(gid, entry.payload.token)
    data = bytearray(scene.raw.get(key))
    data[-1] ^= 1
    scene.raw.set(key, bytes(data))
    with pytest.raises(WireError, match="checksum"):
        scene.run.buffer.read(entry.payload)
    scene.raw.set(key, bytes(data[:-1]))
    with pytest.raises(WireError, match="bytes"):
        scene.run.buffer.read(entry.payload)


def test_claim_serves_eval_before_resume_before_fresh(scene: Scene) -> None:
    scene.enqueue(2)
    (resumed,) = scene.claim()
    scene.run.jobs.release("w0", resumed, "handback")
    scene.enqueue(1, task="quiz")
    assert [job.lane for job in scene.claim(3)] == ["eval", "resume", "fresh"]
    scene.check()


LIMITS = RunLimits(
    tasks={"sums": TaskLimits(), "code": TaskLimits(), "exam": TaskLimits(eval_of="sums")}
)


def test_a_worker_of_a_mixed_fleet_is_served_its_own_lines_only() -> None:
    assert serving_order(
        LIMITS, Serves(frozenset({"exam", "code"}), frozenset({"eval", "fresh"}))
    ) == [("exam", "eval"), ("code", "fresh")]
    assert set(serving_order(LIMITS, Serves(frozenset({"sums"})))) == {
        ("sums", "resume"),
        ("sums", "fresh"),
    }
    assert len(serving_order(LIMITS)) == 5


Make = Callable[..., Scene]


# fifo merges the first groups of each version: it must be the order of arrival, whatever the versions
@given(
    versions=st.lists(st.integers(0, 70), min_size=1, max_size=80),
    count=st.integers(1, 80),
    cut=st.integers(0, 30),
)
def test_fifo_is_the_order_of_arrival_among_64_versions(
    versions: list[int], count: int, cut: int
) -> None:
    limits = RunLimits(tasks={"math": TaskLimits()}, order="fifo", stale_threshold=71)
    store = Store("memory://order")
    scene = Scene(store, store.client, "order", limits)
    pool = scene.keys.pool("math", "completed")
    for arrival, version in enumerate(versions):
        gid = f"math-{arrival:010d}"
        record = {"payload": "t", "chunks": 1, "size": 1, "crc": "0", "samples": 1}
        scene.raw.hset(scene.keys.group(gid), mapping=record | {"version": version})
        scene.raw.zadd(pool, {f"{arrival:010d}:{gid}": version})
    scene.raw.hset(scene.keys.ledger("train"), "taken", 70 + cut)  # the next step is 71 + cut
    oldest = sorted({version for version in versions if version >= cut})[:64]
    wanted = [n for n, version in enumerate(versions) if version in oldest][:count]
    found = [int(entry.gid[-10:]) for entry in scene.run.buffer.peek(count, "math")]
    scene.raw.flushall()
    store.close()
    assert found == wanted


DONE = Status.COMPLETED


def test_update_replaces_the_bytes_and_keeps_the_arrival(scene: Scene) -> None:
    scene.open_trainer()
    first, second = scene.ready(0, 0)
    before = scene.record(first)
    (group, _) = scene.run.buffer.get(2, "math")
    for state in group.states:
        state.reward = {"score": 0.25}
    scene.run.buffer.update(first, group.states, replaces=before["payload"])
    now = scene.record(first)
    assert (now["arrival"], now["version"], now["reward"]) == (before["arrival"], "0", "0.5")
    assert f"{first} {before['payload']} {before['chunks']}" in scene.garbage()
    manifest = scene.take(1, math=2)
    assert manifest.gids == [first, second]
    assert scene.run.buffer.load(manifest)[0].scores.tolist() == [0.25, 0.25]
    scene.check()


def test_update_is_refused_where_the_group_is_not_as_it_was_seen(scene: Scene) -> None:
    scene.open_trainer()
    first, second = scene.ready(0, 0)
    seen = scene.record(first)["payload"]
    update, states = scene.run.buffer.update, [rollout(DONE, FIRST)]
    update(first, states)
    with pytest.raises(GroupHeld, match=r"has changed: .*read it again"):
        update(first, states, replaces=seen)
    scene.take(1, math=1)
    scene.run.jobs.drop(second)
    scene.enqueue(1)
    waiting = "math-0000000002"
    for gid, words in (
        (first, "in no pool: it is taken"),
        (second, "has ended: it is dropped"),
        (waiting, "in no pool: it is waiting"),
        ("math-0000000099", "never started"),
    ):
        before = scene.record(gid)
        with pytest.raises(GroupHeld, match=words):
            update(gid, states)
        assert scene.record(gid) == before
    with pytest.raises(WireError, match="is init"):
        update(first, [rollout(Status.INIT, FIRST)])
    scene.check()


def test_update_whose_bytes_did_not_arrive_changes_nothing(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    (gid,) = scene.ready(0)
    before = scene.record(gid)
    monkeypatch.setattr(
        scene.run.payloads, "write", lambda *_: PayloadRef(gid, "t", 1, 99, "0" * 8)
    )
    with pytest.raises(PayloadMissing, match="0 of"):
        scene.run.buffer.update(gid, [rollout(DONE, FIRST)])
    assert scene.record(gid) == before
