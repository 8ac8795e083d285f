"""Guarantees of the replay buffer of XTuner v1, tested on ours; docstrings give differences."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from buffer.manifest import NotReady
from buffer.wire.rollout import PolicyVersion, RolloutState, Status, VersionSpan
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


def test_staleness_policy_returns_the_stalest_first_then_by_arrival(scene: Scene) -> None:
    """The same, exactly: a double that mixes both (10 before 9, above 2^53) is not used."""
    gids = put(scene, 2, 0, 2, 1, 0, 2, 2, 2, 2, 2, 2, 2)
    ordered = [gids[i] for i in (1, 4, 3, 0, 2, *range(5, 12))]
    assert [group.gid for group in scene.run.buffer.get(99, "math")] == ordered
    assert take(scene, 1, math=12) == {"math": ordered}


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
