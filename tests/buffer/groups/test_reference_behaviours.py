"""Guarantees of the replay buffer of XTuner v1, tested on ours; docstrings give differences."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from buffer.errors import ConfigError, RunExists, WireError
from buffer.groups.pools import PoolSizes
from buffer.manifest import NotReady
from buffer.run import Run
from buffer.wire.rollout import PolicyVersion, RolloutState, Status, VersionSpan, group_status
from tests.buffer.scene import Scene, rollout

Make = Callable[..., Scene]
DONE = Status.COMPLETED
CUT = Status.ABORTED
OLD = Status.EXPIRED


def made(version: int) -> PolicyVersion:
    return PolicyVersion("l1", version)


def put(scene: Scene, *versions: int, status: Status = DONE, task: str = "math") -> list[str]:
    return list(
        scene.run.buffer.put(task, [[rollout(status, made(version))] for version in versions])
    )


def take(scene: Scene, step: int, strict: bool = False, **counts: int) -> dict[str, list[str]]:
    taken = scene.run.buffer.take_batch(scene.trainer, step, counts, strict=strict)
    assert not isinstance(taken, NotReady)
    return {task: [group.gid for group in groups] for task, groups in taken.items()}


def pass_steps(scene: Scene, taken: int) -> None:
    scene.raw.hset(scene.keys.ledger("train"), "taken", taken)


@pytest.fixture
def scene(make_scene: Make) -> Scene:
    scene = make_scene(stale_threshold=4, on_straggler="retry")
    scene.open_trainer()
    return scene


def test_fifo_policy_returns_groups_as_they_were_put(make_scene: Make) -> None:
    """The same. There, `get` removes; here it reads, and `take_batch` removes."""
    scene = make_scene(order="fifo", stale_threshold=9)
    scene.open_trainer()
    gids = put(scene, 3, 1, 2)
    assert [group.gid for group in scene.run.buffer.get(2, "math")] == gids[:2]
    assert take(scene, 1, math=2) == {"math": gids[:2]}
    assert take(scene, 2, math=2) == {"math": gids[2:]}


def test_staleness_policy_returns_the_stalest_first_then_by_arrival(scene: Scene) -> None:
    """The same, exactly: a double that mixes both (10 before 9, above 2^53) is not used."""
    gids = put(scene, 2, 0, 2, 1, 0, 2, 2, 2, 2, 2, 2, 2)
    ordered = [gids[i] for i in (1, 4, 3, 0, 2, *range(5, 12))]
    assert [group.gid for group in scene.run.buffer.get(99, "math")] == ordered
    assert take(scene, 1, math=12) == {"math": ordered}


def test_tasks_and_statuses_are_apart(scene: Scene) -> None:
    """The same. Tasks that the run does not have are an error here, an empty answer there."""
    put(scene, 0, 0)
    put(scene, 0, status=CUT)
    put(scene, 0, status=OLD)
    put(scene, 0, task="code")
    buffer = scene.run.buffer
    assert [buffer.count("math", status) for status in ("completed", "aborted", "expired")] == [
        2,
        1,
        1,
    ]
    assert buffer.count_statuses("math", "code") == {
        "math": PoolSizes(2, 1, 1, 0),
        "code": PoolSizes(1, 0, 0, 0),
    }
    assert (
        sum(
            size.completed + size.aborted + size.expired
            for size in buffer.count_statuses().values()
        )
        == 5
    )
    with pytest.raises(ConfigError, match="no task"):
        buffer.count("unknown")


def test_counts_that_ask_for_nothing_get_nothing(scene: Scene) -> None:
    """The same: n <= 0 is ignored, fewer than n is normal, nothing to wait for is ready."""
    put(scene, 0)
    buffer = scene.run.buffer
    assert buffer.get(0, "math") == buffer.get(-1, "math") == []
    assert len(buffer.get(5, "math")) == 1
    assert buffer.is_ready({})
    assert buffer.is_ready({"math": 1, "code": 0})
    assert not buffer.is_ready({"math": 1, "code": 1})


def test_take_batch_of_several_tasks_gives_what_there_is(scene: Scene) -> None:
    """The same with `strict=False`.

    Here the default is all or nothing, in one step: there, is_ready and take are two steps, and
    several consumers take each other's groups. A best effort that finds nothing is NotReady.
    """
    math = put(scene, 0, 0)
    code = put(scene, 0, task="code")
    buffer = scene.run.buffer
    assert isinstance(buffer.take_batch(scene.trainer, 1, {"math": 1, "code": 2}), NotReady)
    assert take(scene, 1, math=1, code=2) == {"math": math[:1], "code": code}
    counters = scene.counters()
    assert (counters["consumed"], buffer.count("math")) == (
        "1",
        1,
    )  # moved together: no gap to over-produce in
    assert isinstance(buffer.take_batch(scene.trainer, 2, {"code": 1}, strict=False), NotReady)


def test_put_of_no_groups_is_nothing_and_of_an_empty_one_an_error(scene: Scene) -> None:
    """Unlike there: an empty list is one group, silently not stored; INIT counts as COMPLETED."""
    assert scene.run.buffer.put("math", []) == {}
    for states in ([], [rollout(Status.INIT, made(0))]):
        with pytest.raises(WireError):
            scene.run.buffer.put("math", [states])
    assert group_status([Status.INIT, DONE]) is Status.INIT


@pytest.mark.parametrize("status", [Status.FAILED, Status.FILTERED])
def test_failed_and_filtered_groups_never_enter(scene: Scene, status: Status) -> None:
    """The same as its newest version, which drops them before `put`; here `put` raises an error."""
    with pytest.raises(WireError, match=status):
        scene.run.buffer.put("math", [[rollout(DONE, made(0)), rollout(status, made(0), 1)]])


def test_new_tokens_are_stamped_and_old_versions_never_rewritten(scene: Scene) -> None:
    """The same arithmetic, with spans for lists: [1, 3, 3].

    There, `put` stamps the caller's objects with the weights of the moment; here the caller names
    the weights, and its objects are not changed.
    """
    state = RolloutState(
        prompt_ids=[1],
        response_ids=[5, 6, 7],
        logprobs=[0.0] * 3,
        spans=[VersionSpan(0, 1, 1, "l1")],
        status=DONE,
    )
    (gid,) = scene.run.buffer.put("math", [[state]], weights=made(3))
    stored = scene.run.buffer.read(scene.payload(gid)).states[0]
    assert [(s.start, s.length, s.version) for s in stored.spans] == [(0, 1, 1), (1, 2, 3)]
    assert scene.record(gid)["version"] == "1"
    assert len(state.spans) == 1


@pytest.mark.parametrize("status", [DONE, CUT])
def test_put_expires_what_is_too_old_and_resets_it(scene: Scene, status: Status) -> None:
    """The same threshold: at interval 4, version 4 serves steps 5 to 8."""
    pass_steps(scene, 7)
    (young,) = put(scene, 4, status=status)
    pass_steps(scene, 8)
    (old,) = put(scene, 4, status=status)
    assert (scene.record(young)["status"], scene.record(old)["status"]) == (status, "expired")
    assert scene.run.buffer.read(scene.payload(old)).states[0].response_ids.tolist() == []


@pytest.mark.parametrize("status", [DONE, CUT])
def test_fresh_siblings_of_an_expired_rollout_keep_their_tokens(
    scene: Scene, status: Status
) -> None:
    """The same, whether it expires in its pool or when it is put.

    There, put resets the rollout; here the worker that claims the group does, because no script
    reads tokens.
    """
    pass_steps(scene, 7)
    states = [rollout(status, made(version), index) for index, version in enumerate((4, 6, 4))]
    (aged,) = scene.run.buffer.put("math", [states])
    pass_steps(scene, 8)
    assert scene.run.buffer.refresh_staleness("math") == {"math": 1}
    (late,) = scene.run.buffer.put("math", [states])
    for gid in (aged, late):
        limit = scene.run.buffer.age_limit(gid)
        group = scene.run.buffer.read(scene.payload(gid))
        assert limit is not None
        assert [limit.is_too_old(state) for state in group.states] == [True, False, True]
        assert (scene.record(gid)["status"], scene.record(gid)["version"]) == ("expired", "")
    assert scene.run.account.totals().clean


def test_put_keeps_nothing_of_what_is_not_retried(scene: Scene) -> None:
    """The same: expired_groups_retryable=False stores nothing. Here it is counted as dropped."""
    pass_steps(scene, 9)
    placed = scene.run.buffer.put("math", [[rollout(DONE, made(0))]], retryable=False)
    assert list(placed.values()) == ["dropped"]
    assert scene.run.buffer.count_statuses("math") == {"math": PoolSizes(0, 0, 0, 0)}
    assert scene.run.account.totals().clean


def test_refresh_expires_and_keeps_the_order_of_the_others(make_scene: Make) -> None:
    """The same, but each group is counted once, and the step is the ledger's, not the caller's.

    Readiness does not depend on it: groups that are too stale are not counted.
    """
    scene = make_scene(order="fifo", stale_threshold=4, on_straggler="retry")
    scene.open_trainer()
    gids = put(scene, 3, 0, 2, 3)
    cut = put(scene, 0, status=CUT)
    pass_steps(scene, 4)
    buffer = scene.run.buffer
    assert buffer.count("math") == 3
    assert buffer.refresh_staleness() == {"math": 2, "code": 0}
    assert buffer.refresh_staleness() == {"math": 0, "code": 0}
    assert {group.gid for group in buffer.get(9, "math", "expired")} == {gids[1], *cut}
    assert [group.gid for group in buffer.get(9, "math")] == [gids[0], gids[2], gids[3]]
    assert scene.run.account.totals().clean


def test_refresh_drops_what_is_not_retried(make_scene: Make) -> None:
    """The same: deleted, not kept as expired."""
    scene = make_scene(stale_threshold=1)
    scene.open_trainer()
    put(scene, 0)
    pass_steps(scene, 3)
    assert scene.run.buffer.refresh_staleness("math") == {"math": 1}
    assert scene.run.buffer.count_statuses("math") == {"math": PoolSizes(0, 0, 0, 0)}


def test_groups_without_tokens_have_no_age(scene: Scene) -> None:
    """The same: their staleness is 0 for ever there, they have none here."""
    empty = RolloutState(prompt_ids=[1], status=CUT)
    (gid,) = scene.run.buffer.put("math", [[empty]])
    pass_steps(scene, 99)
    assert scene.run.buffer.refresh_staleness("math") == {"math": 0}
    assert [group.gid for group in scene.run.buffer.get(1, "math", "aborted")] == [gid]


def test_tokens_too_old_are_masked_and_a_rollout_without_others_expires(make_scene: Make) -> None:
    """The same formula, per token.

    There, refresh must have run, and reads every token; here the score is enough.
    """
    scene = make_scene(stale_threshold=4, token_threshold=2, on_straggler="retry")
    scene.open_trainer()
    mixed = RolloutState(
        prompt_ids=[1], response_ids=[5, 6], logprobs=[0.0] * 2, status=DONE,
        spans=[VersionSpan(0, 1, 0, "l1"), VersionSpan(1, 1, 2, "l1")],
    )  # fmt: skip
    gids = list(scene.run.buffer.put("math", [[rollout(DONE, made(0))], [mixed]]))
    pass_steps(scene, 2)
    assert scene.run.buffer.count("math") == 1
    taken = scene.run.buffer.take_batch(scene.trainer, 3, {"math": 2}, strict=False)
    assert isinstance(taken, dict)
    assert [(group.gid, group.mask.tolist()) for group in taken["math"]] == [(gids[1], [0, 1])]


def test_what_is_put_again_goes_to_the_end_and_an_update_does_not(make_scene: Make) -> None:
    """Put again: the same, as a new group.

    `update` is public here; the reference does the same inside `refresh`.
    """
    scene = make_scene(order="fifo")
    scene.open_trainer()
    first, second = put(scene, 0, 0)
    states = scene.run.buffer.get(1, "math")[0].states
    scene.run.buffer.update(first, states)
    assert [group.gid for group in scene.run.buffer.get(2, "math")] == [first, second]
    scene.run.buffer.delete(first)
    (again,) = scene.run.buffer.put("math", [states])
    assert [group.gid for group in scene.run.buffer.get(2, "math")] == [second, again]


def test_what_get_returns_cannot_change_what_is_stored(scene: Scene) -> None:
    """Unlike there, where `get` returns the stored objects themselves."""
    (gid,) = put(scene, 0)
    scene.run.buffer.get(1, "math")[0].states[0].reward = {"score": -1.0}
    assert scene.run.buffer.read(scene.payload(gid)).scores.tolist() == [1.0]


def test_a_batch_that_was_taken_is_not_lost_with_who_took_it(scene: Scene) -> None:
    """Unlike there, where a group that was taken exists in one process only."""
    gids = put(scene, 0, 0)
    assert take(scene, 1, math=2) == {"math": gids}
    scene.open_trainer(step=0, lineage="l2", take_over=True)
    assert take(scene, 1, math=2) == {"math": gids}


def test_resume_is_refused_into_what_is_not_empty(scene: Scene, tmp_path: Path) -> None:
    """The same; orders and numbers continue where they were.

    See also tests/buffer/snapshot/test_snapshot.py and test_snapshot_of_order.py.
    """
    put(scene, 0)
    scene.run.save(tmp_path / "saved")
    with pytest.raises(RunExists):
        Run.restore(scene.store, tmp_path / "saved")
