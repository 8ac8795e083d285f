"""A pooled group gets other rollouts and stays in its pool (I1, I2, I8, I13)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from buffer.errors import GroupHeld, PayloadMissing, WireError
from buffer.job import PayloadRef
from buffer.wire.rollout import Status
from tests.buffer.scene import FIRST, Scene, rollout

Make = Callable[..., Scene]
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
