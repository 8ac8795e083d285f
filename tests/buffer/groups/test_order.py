"""The order in which ready groups are taken: no policy takes stale groups, or loses any (I8)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from buffer.errors import ConfigError
from buffer.groups.order_policy import Finished
from buffer.groups.pools import PoolSizes
from buffer.ids import group_id
from buffer.job import Job
from buffer.run import Run
from buffer.wire.rollout import Status
from tests.buffer.scene import FIRST, Scene, extend

Make = Callable[..., Scene]
INDEXED = ("fifo", "length_fair", "tests:policy")


def submit(scene: Scene, job: Job, *, length: int = 2, run: Run | None = None) -> None:
    """Submit a completed group with responses of `length` tokens."""
    run = run or scene.run
    group = run.buffer.read(job.payload)
    for _ in range(length // 2):
        group = extend(group, Status.COMPLETED, FIRST)
    run.buffer.submit("w0", job, group, 4)


def by_draw(group: Finished) -> float:
    """Put the latest draw first."""
    return -group.draw


def with_order(make_scene: Make, order: str, **limits: object) -> Scene:
    scene = make_scene(order=order, **limits)
    scene.run.buffer.order_function = by_draw
    scene.open_trainer(lineage="l0")
    return scene


def index(scene: Scene) -> list[str]:
    return [
        member.decode().partition(":")[2]
        for member in scene.raw.zrange(scene.keys.order("math"), 0, -1)
    ]


# -- each policy ----


def test_length_fair_lets_short_and_long_responses_take_turns(make_scene: Make) -> None:
    scene = with_order(make_scene, "length_fair")
    scene.enqueue(8)
    jobs = scene.claim(8)
    for job in jobs[:6]:
        submit(scene, job)
    for job in jobs[6:]:
        submit(scene, job, length=40)
    short = [job.gid for job in jobs[:6]]
    long = [job.gid for job in jobs[6:]]
    assert scene.take(1, math=3).gids == [short[0], long[0], short[1]]
    # a bucket that was empty does not catch up on the turns it missed
    scene.enqueue(2)
    late = scene.claim(2)
    for job in late:
        submit(scene, job, length=200)
    assert scene.take(2, math=4).gids == [long[1], short[2], late[0].gid, short[3]]
    scene.check()


def test_a_policy_of_a_user_decides_by_the_facts_it_gets(make_scene: Make) -> None:
    scene = with_order(make_scene, "tests:policy")
    seen: list[Finished] = []

    def note(group: Finished) -> float:
        seen.append(group)
        return by_draw(group)

    scene.run.buffer.order_function = note
    gids = scene.ready(0, 0, 0)
    assert scene.take(1, math=2).gids == [gids[2], gids[1]]
    assert seen[1] == Finished(
        gids[1], "math", 1, samples=2, tokens=4, longest=2, reward=1.0, version=0
    )


@pytest.mark.parametrize(
    ("function", "why"), [(None, "not loaded"), (lambda _: float("nan"), "returned nan")]
)
def test_a_policy_that_gives_no_score_is_an_error_of_that_group(
    make_scene: Make, function: Callable[[Finished], float] | None, why: str
) -> None:
    scene = with_order(make_scene, "tests:policy")
    scene.run.buffer.order_function = function
    scene.enqueue(1)
    (job,) = scene.claim()
    with pytest.raises(ConfigError, match=why):
        submit(scene, job)
    assert scene.record(job.gid)["stage"] == "running"


# -- what every policy keeps ----


@pytest.mark.parametrize("order", ["staleness", "freshest", *INDEXED])
def test_no_policy_takes_groups_that_are_too_stale(make_scene: Make, order: str) -> None:
    scene = with_order(make_scene, order)
    scene.ready(0, 0, 0, 0)
    scene.take(1), scene.take(2)
    young = scene.ready(1, 2)
    answer = scene.try_take(3, math=3)
    assert answer.missing == {"math": (2, 3)}
    manifest = scene.take(3, math=2)
    assert sorted(manifest.gids) == young
    assert scene.run.buffer.count_statuses("math") == {"math": PoolSizes(0, 0, 0, 2)}
    scene.check()


def test_groups_that_are_not_in_the_index_are_put_in_front(make_scene: Make) -> None:
    before = make_scene()
    before.open_trainer(lineage="l0")
    old = before.ready(1, 0, 0)
    before.enqueue(3)
    jobs = before.claim(3)
    limits = before.run.limits.model_copy(update={"order": "tests:policy"})
    after = Run(before.store, before.name, before.run.nonce, limits)
    after.buffer.order_function = by_draw
    submit(before, jobs[0], run=after)
    submit(before, jobs[1], run=after)
    submit(before, jobs[2])  # a worker that does not have the new policy yet
    manifest = after.ledger.take(before.trainer, 1, {"math": 5})
    assert manifest.gids == [*old, jobs[2].gid, jobs[1].gid]  # type: ignore[union-attr]
    assert index(before) == [jobs[0].gid]
    before.check()


def test_a_crowd_of_stale_groups_in_front_is_cleared_away(make_scene: Make) -> None:
    scene = with_order(make_scene, "fifo")
    scene.ready(0, 0)
    scene.take(1), scene.take(2)
    (young,) = scene.ready(2)
    pipe = scene.raw.pipeline(transaction=False)
    for draw in range(100, 3200):
        gid = group_id("math", draw)
        pipe.hset(scene.keys.group(gid), mapping={"payload": "init", "chunks": 1, "draw": draw})
        pipe.zadd(scene.keys.pool("math", "completed"), {f"{0:010d}:{gid}": 0})
        pipe.zadd(scene.keys.order("math"), {f"{0:010d}:{gid}": 0})
    pipe.execute()
    assert scene.take(3).gids == [young]
    assert scene.run.buffer.count("math") == 0
