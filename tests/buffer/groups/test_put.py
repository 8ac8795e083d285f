"""Groups that no worker holds: `ReplayBuffer.put` (I1, I3, I8, I13)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from buffer.errors import ConfigError, Fenced, LedgerError, PayloadMissing, WireError
from buffer.groups.put_groups import GroupPut
from buffer.ids import IMPORTED_FROM, group_id
from buffer.job import Job, PayloadRef
from buffer.manifest import Manifest, ManifestEntry
from buffer.redis.store import RunContext, Store
from buffer.wire.group import RolloutGroup
from buffer.wire.rollout import PolicyVersion, RolloutState, Status, VersionSpan
from tests.buffer.keyspace import payload_keys
from tests.buffer.scene import Scene, rollout

Make = Callable[..., Scene]
FIRST_GID = group_id("math", IMPORTED_FROM)


def rollouts(
    *statuses: Status, version: int | None = 0, lineage: str = "l0", **fields: Any
) -> list[RolloutState]:
    """Return one rollout of two tokens for each status (default: two that are completed)."""
    made = None if version is None else PolicyVersion(lineage, version)
    return [
        rollout(status, made, i, **fields)
        for i, status in enumerate(statuses or (Status.COMPLETED,) * 2)
    ]


def test_put_groups_are_taken_like_others_and_take_no_draw(make_scene: Make) -> None:
    scene = make_scene()
    scene.open_trainer()
    (drawn,) = scene.ready(0)
    pools = scene.run.buffer.put("math", [rollouts(), rollouts()])
    first, second = pools
    assert pools == {FIRST_GID: "completed", group_id("math", IMPORTED_FROM + 1): "completed"}
    (task,) = (t for t in scene.run.account.totals().tasks if t.task == "math")
    assert (task.enqueued, task.put, task.imported, task.cursor, task.total) == (1, 2, 0, 1, 3)
    manifest = scene.take(1, math=3)
    assert manifest.gids == [drawn, first, second]
    group = scene.run.buffer.read(manifest.entries[1].payload)
    assert (group.gid, group.status, group.response_ids.tolist()) == (
        first,
        Status.COMPLETED,
        [5, 6, 5, 6],
    )
    scene.run.ledger.commit(scene.trainer, 1, 1)
    assert scene.bit("archived", IMPORTED_FROM) == 1
    scene.check()


@pytest.mark.parametrize(
    ("states", "message"),
    [
        ([], "has no rollouts"),
        (rollouts(Status.INIT, Status.COMPLETED), "is init"),
        (rollouts(Status.FAILED, Status.COMPLETED), "is failed"),
        (rollouts(Status.FILTERED, Status.EXPIRED), None),
        (rollouts(Status.FILTERED, Status.COMPLETED), "is filtered"),
        (rollouts(version=None), "no spans that name the weights"),
        (rollouts(extra={"x": object()}), "extra"),
        ([rollouts()[0].model_copy(update={"reward": {"score": 1e39}})], "reward"),
    ],
)
def test_put_refuses_what_is_no_result_and_puts_nothing(
    scene: Scene, states: list[RolloutState], message: str | None
) -> None:
    before = scene.dump()
    if message is None:  # expired is worse than filtered
        assert list(scene.run.buffer.put("math", [states]).values()) == ["dropped"]
        return
    with pytest.raises(WireError, match=message):
        scene.run.buffer.put("math", [rollouts(), states])
    assert scene.dump() == before


def test_put_refuses_tasks_that_do_not_train_and_does_nothing_for_no_groups(scene: Scene) -> None:
    before = scene.dump()
    for task in ("quiz", "unknown"):
        with pytest.raises(ConfigError, match=f"no training task '{task}'.*math, code"):
            scene.run.buffer.put(task, [rollouts()])
    assert scene.run.buffer.put("math", []) == {}
    assert scene.dump() == before


def test_put_stamps_only_tokens_behind_the_last_span_of_a_copy(scene: Scene) -> None:
    states = rollouts(version=None)
    states[0].spans = [VersionSpan(0, 1, 0, "l0")]
    scene.run.buffer.put("math", [states], weights=PolicyVersion("l0", 3))
    stored = scene.run.buffer.read(scene.payload(FIRST_GID)).states
    assert [s.spans for s in stored] == [[(0, 1, 0, "l0"), (1, 1, 3, "l0")], [(0, 2, 3, "l0")]]
    assert (len(states[0].spans), states[1].spans) == (1, [])
    assert scene.record(FIRST_GID)["version"] == "0"


def test_ageless_groups_never_expire(make_scene: Make) -> None:
    scene = make_scene()
    scene.open_trainer()
    scene.raw.hset(scene.keys.ledger("train"), "taken", 99)
    assert scene.run.buffer.put("math", [rollouts(version=None)], ageless=True) == {
        FIRST_GID: "completed"
    }
    assert scene.pool("completed") == [(FIRST_GID, float("inf"))]
    assert scene.take(100).gids == [FIRST_GID]


@pytest.mark.parametrize(
    ("on_straggler", "retryable", "pool"),
    [
        ("drop", None, "dropped"),
        ("retry", None, "expired"),
        ("drop", True, "expired"),
        ("retry", False, "dropped"),
    ],
)
def test_what_is_too_old_expires_when_it_is_put(
    make_scene: Make, on_straggler: str, retryable: bool | None, pool: str
) -> None:
    scene = make_scene(on_straggler=on_straggler)
    scene.open_trainer()
    scene.ready(0, 0)
    for step in (1, 2):
        scene.take(step)
    groups = [rollouts(version=0), rollouts(version=1, lineage="l1")]
    pools = scene.run.buffer.put("math", groups, retryable=retryable)
    assert list(pools.values()) == [pool, "completed"]
    (first, _) = pools
    assert scene.run.account.stages("math", IMPORTED_FROM) == [
        "pool" if pool == "expired" else "dropped"
    ]
    while scene.run.payloads.collect():
        pass
    left = {key for key in payload_keys(scene.raw, scene.name) if first in key}
    assert left == ({scene.keys.payload(first, "init")} if pool == "expired" else set())
    scene.check()


def test_put_whose_reply_was_lost_is_made_once_whatever_happened_since(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Store.call

    def lossy(self: Store, script: str, keys: Any, args: Any, *tail: Any, **options: Any) -> Any:
        reply = original(self, script, keys, args, *tail, **options)
        if script == "put" and args["operation"] != other._operation:
            # the group has ended and others were put when the call is repeated
            scene.run.jobs.drop(args["gid"])
            other.put("math", lambda gid: RolloutGroup(gid, "math", rollouts()), retryable=False)
            assert original(self, script, keys, args, *tail, **options) == reply
        return reply

    other = GroupPut(
        RunContext(scene.run.store, scene.keys, scene.run.limits), scene.run.payloads, "put"
    )
    monkeypatch.setattr(Store, "call", lossy)
    mine = scene.run.buffer.put("math", [rollouts(), rollouts()])
    monkeypatch.undo()
    other.close()
    assert list(mine) == [group_id("math", IMPORTED_FROM + i) for i in (0, 2)]
    counters = scene.counters()
    assert (counters["put"], counters["dropped"]) == ("4", "2")
    assert not [name for name in counters if name.startswith("put:")]
    scene.check()


def test_put_whose_bytes_did_not_arrive_counts_nothing(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        scene.run.payloads, "write", lambda *_: PayloadRef(FIRST_GID, "t", 1, 99, "0")
    )
    with pytest.raises(PayloadMissing, match="0 bytes arrived"):
        scene.run.buffer.put("math", [rollouts()])
    assert "put" not in scene.counters()


def bury(scene: Scene, reason: str = "no good") -> Job:
    """Make a dead group that had tokens before it died."""
    scene.enqueue(1)
    (job,) = scene.claim()
    scene.submit(job, status=Status.ABORTED)
    scene.run.jobs.reissue(scene.producer, "math", "aborted", 1000)
    for _ in range(scene.run.limits.max_tries):
        (job,) = scene.claim()
        assert job.payload.token != "init"
        scene.run.jobs.release("w0", job, "failed", reason)
    assert scene.record(job.gid)["stage"] == "dead"
    return job


def quarantine(
    scene: Scene, step: int, entry: ManifestEntry, reason: str = "bad bytes"
) -> Manifest:
    return scene.run.ledger.quarantine(scene.trainer, step, entry, reason)


# -- requeue ----


# -- drop ----


# -- quarantine ----


def test_quarantine_is_refused_to_a_zombie_after_commit_and_outside_of_the_batch(
    scene: Scene,
) -> None:
    zombie = scene.open_trainer()
    scene.ready(0, 0, 0)
    first = scene.take(1)
    with pytest.raises(LedgerError, match="not in the batch"):
        quarantine(scene, 2, first.entries[0])
    scene.open_trainer(lineage="l2", take_over=True)
    with pytest.raises(Fenced):
        scene.run.ledger.quarantine(zombie, 1, first.entries[0], "")
    scene.take(1)
    scene.run.ledger.commit(scene.trainer, 1, 0)
    before = scene.dump()
    with pytest.raises(LedgerError, match="step 1 is committed"):
        quarantine(scene, 1, first.entries[0])
    assert scene.dump() == before


def test_dead_letters_are_listed_newest_first_with_strange_reasons(scene: Scene) -> None:
    first = bury(scene, 'he said "no"\n\x1b[31m')
    scene.open_trainer()
    (gid,) = scene.ready(0)
    quarantine(scene, 1, scene.take(1).entries[0], 'bytes "\\" \x00')
    letters = {letter.gid: letter for letter in scene.run.dead_letters.newest()}
    assert len(scene.run.dead_letters) == 2
    assert (letters[first.gid].reason, letters[first.gid].tries) == ('he said "no"\n\\u001b[31m', 3)
    assert (letters[gid].reason, letters[gid].step, letters[gid].worker) == (
        'bytes "\\" \x00',
        1,
        "w0",
    )
    assert all(letter.age_ms >= 0 and letter.task == "math" for letter in letters.values())
