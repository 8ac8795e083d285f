"""take, commit and refresh (I4, I5, I6, I8)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from buffer.errors import ConfigError, LedgerError
from buffer.ids import group_id
from buffer.manifest import Manifest, NotReady
from buffer.wire.rollout import PolicyVersion, Status
from tests.buffer.scene import Scene


def test_take_hands_out_the_most_stale_first_then_by_arrival(scene: Scene) -> None:
    scene.open_trainer(lineage="l0")
    gids = scene.ready(1, 0, 1, 0)
    assert scene.take(1, math=3).gids == [gids[1], gids[3], gids[0]]
    assert scene.pool("completed") == [(gids[2], 1.0)]
    assert scene.counters()["consumed"] == "3"
    scene.check()


def test_take_is_all_or_nothing_when_strict(scene: Scene) -> None:
    scene.open_trainer()
    scene.ready(0, 0)
    scene.ready(0, task="code")
    before = scene.dump()
    answer = scene.try_take(1, math=2, code=2)
    assert answer.missing == {"math": (2, 2), "code": (1, 2)}
    assert str(answer) == "waiting for groups: code 1 of 2"
    assert scene.dump() == before
    manifest = scene.take(1, math=2, code=1)
    assert [gid[:4] for gid in manifest.gids] == ["math", "math", "code"]
    assert "asked=math=2,code=1 strict=1" in manifest.header
    scene.check()


def test_take_brings_what_there_is_when_best_effort(scene: Scene) -> None:
    scene.open_trainer()
    before = scene.dump()
    assert isinstance(scene.try_take(1, strict=False, math=4), NotReady)
    assert scene.dump() == before
    (gid,) = scene.ready(0)
    manifest = scene.take(1, strict=False, math=4, code=1)
    assert manifest.gids == [gid]
    assert "strict=0" in manifest.header
    scene.check()


def test_take_of_no_groups_answers_at_once_and_leaves_the_step_open(scene: Scene) -> None:
    scene.open_trainer()
    scene.ready(0)
    before = scene.dump()
    for counts in ({}, {"math": 0}):
        answer = scene.run.ledger.take(scene.trainer, 1, counts)
        assert isinstance(answer, Manifest)
        assert (answer.step, answer.entries, answer.is_recorded) == (1, (), False)
    assert scene.dump() == before
    first = scene.take(1, math=1)
    assert scene.run.ledger.take(scene.trainer, 1, {}) == first


@pytest.mark.parametrize("counts", [{"maths": 1}, {"math": 1, "quiz": 0}, {"math": -1}])
def test_take_refuses_what_a_training_batch_cannot_have(
    scene: Scene, counts: dict[str, int]
) -> None:
    scene.open_trainer()
    with pytest.raises(ConfigError, match=r"can(not)? be taken"):
        scene.run.ledger.take(scene.trainer, 1, counts)


def test_take_of_a_taken_step_is_the_same_record_before_any_other_check(scene: Scene) -> None:
    scene.open_trainer()
    gids = scene.ready(0, 0, 0)
    first = scene.take(1, math=2)
    scene.run.ledger.commit(scene.trainer, 1, 0)
    before = scene.dump()
    assert scene.take(1, math=1) == first
    assert scene.take(1, code=7) == first
    assert scene.run.ledger.manifest(1) == first
    assert scene.dump() == before
    assert scene.take(2, math=1).gids == [gids[2]]
    scene.check()


def test_take_refuses_gaps_and_freed_steps(scene: Scene) -> None:
    scene.open_trainer()
    scene.ready(0, 0, 0)
    with pytest.raises(LedgerError, match="last taken step is 0"):
        scene.take(2)
    scene.take(1)
    scene.run.ledger.commit(scene.trainer, 1, 1)
    with pytest.raises(LedgerError, match="behind the committed step 1"):
        scene.take(1)
    with pytest.raises(LedgerError, match="at most 1024"):
        scene.take(2, math=1025)
    scene.check()


@pytest.mark.parametrize("strict", [True, False])
def test_take_never_hands_out_what_is_too_stale_even_without_refresh(
    scene: Scene, strict: bool
) -> None:
    scene.open_trainer()
    gids = scene.ready(0, 0, 0)
    scene.take(1), scene.take(2)
    assert scene.pool("completed") == [(gids[2], 0.0)]
    # threshold 2: staleness 3 - 0 - 1 is not below it
    assert isinstance(scene.try_take(3, strict=strict), NotReady)
    assert scene.pool("completed") == [(gids[2], 0.0)]
    fresh = scene.ready(1, lineage="l1")
    assert scene.take(3, strict=strict).gids == fresh
    scene.check()


def test_groups_without_tokens_never_age(scene: Scene) -> None:
    scene.open_trainer()
    scene.enqueue(1)
    (job,) = scene.claim()
    scene.submit(job, None)
    assert scene.pool("completed") == [(job.gid, float("inf"))]
    scene.raw.hset(
        scene.keys.ledger("train"),
        mapping=dict.fromkeys(("taken", "committed", "freed", "forgotten"), 50),
    )
    assert scene.run.buffer.refresh_staleness("math") == {"math": 0}
    assert scene.take(51).entries[0].version is None
    scene.check()


@pytest.mark.parametrize("status", ["completed", "aborted"])
def test_refresh_drops_what_is_too_old(scene: Scene, status: str) -> None:
    scene.open_trainer(lineage="l0")
    scene.enqueue(2)
    for job, version in zip(scene.claim(2), (0, 1), strict=True):
        scene.submit(job, PolicyVersion("l0", version), status=Status(status))
    old = group_id("math", 0)
    young = group_id("math", 1)
    scene.ready(0, 0, task="code")
    scene.take(1, code=1), scene.take(2, code=1)
    token = scene.record(old)["payload"]
    assert scene.run.buffer.refresh_staleness("math") == {"math": 1}
    assert scene.pool(status) == [(young, 1.0)]
    assert (scene.record(old), scene.bit("dropped", 0), scene.counters()["dropped"]) == ({}, 1, "1")
    assert scene.garbage() == {f"{old} init 1", f"{old} {token} 1"}
    scene.check()


def test_refresh_keeps_prompts_for_another_try_when_expired_groups_are_retried(
    make_scene: Callable[..., Scene],
) -> None:
    scene = make_scene(on_straggler="retry", tail_batch_trigger_size=1)
    scene.open_trainer()
    gids = scene.ready(0, 0, 0)
    scene.take(1), scene.take(2)
    token = scene.record(gids[2])["payload"]
    assert scene.run.buffer.refresh_staleness("math", limit=1) == {"math": 1}
    assert scene.pool("expired") == [(gids[2], float("inf"))]
    assert scene.garbage() == {f"{gids[2]} {token} 1"}
    record = scene.record(gids[2])
    assert (record["payload"], record["status"], record["version"]) == ("init", "expired", "")
    scene.check()
    scene.run.janitor.sweep()
    assert scene.run.jobs.reissue(scene.producer, "math", "expired", 1000) == 1
    (job,) = scene.claim()
    assert [s.status for s in scene.run.buffer.read(job.payload).states] == [
        Status.INIT,
        Status.INIT,
    ]
    scene.check()


def test_refresh_continues_until_nothing_is_left_when_slices_are_small(scene: Scene) -> None:
    scene.open_trainer()
    scene.ready(*[0] * 7)
    scene.take(1), scene.take(2)
    assert scene.run.buffer.refresh_staleness("math", limit=2) == {"math": 5}
    assert scene.run.buffer.count("math") == 0
    scene.check()


def test_commit_frees_only_up_to_the_oldest_kept_checkpoint(scene: Scene) -> None:
    scene.open_trainer()
    gids = scene.ready(0, 0, 0, 0)
    first = scene.take(1, math=2)
    second = scene.take(2, math=2)
    scene.run.ledger.commit(scene.trainer, 2, 1)
    assert scene.run.ledger.steps() == (2, 2, 1)
    assert (scene.run.ledger.manifest(1), scene.run.ledger.manifest(2)) == (None, second)
    assert [scene.bit("archived", i) for i in range(4)] == [int(gid in first.gids) for gid in gids]
    assert (scene.counters()["taken"], scene.counters()["archived"]) == ("2", "2")
    scene.check()
    scene.run.ledger.commit(scene.trainer, 1, 0)
    assert scene.run.ledger.steps() == (2, 2, 1)
    with pytest.raises(LedgerError, match="GAP 2"):
        scene.run.ledger.commit(scene.trainer, 3, 2)
    scene.check()


def test_commit_frees_in_slices_and_a_half_freed_batch_is_never_delivered_again(
    scene: Scene,
) -> None:
    scene.open_trainer()
    scene.ready(0, 0, 0)
    scene.take(1, math=3)
    keys = scene.keys
    reply = scene.store.call(
        "commit",
        keys.slots(),
        {"nonce": scene.trainer, "step": 1, "keep": 1, "limit": 2},
        [keys.slots(task="math")],
        ["math"],
    )
    assert reply == ["OK", "1", "0"]
    assert scene.raw.hget(keys.ledger("train"), "slice") == b"2"
    assert scene.counters()["archived"] == "2"
    with pytest.raises(LedgerError, match="behind the committed step 1"):
        scene.take(1)
    scene.check()
    with pytest.raises(LedgerError, match="step 0"):
        scene.open_trainer(step=0, take_over=True)
    scene.run.ledger.commit(scene.trainer, 1, 1)
    assert scene.raw.exists(keys.batch("train", 1)) == 0
    assert scene.counters()["archived"] == "3"
    scene.check()
