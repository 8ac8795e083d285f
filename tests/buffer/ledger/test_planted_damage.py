"""fsck names the groups that were damaged, and no others, in a run with many groups (I1)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from random import Random

import pytest

from buffer.ids import ENDS, GID, group_id
from buffer.job import Job
from tests.buffer.scene import Scene

GROUPS = 200
SHARES = (0.15, 0.05, 0.35, 0.15, 0.1, 0.1, 0.05)
"""Of groups that wait, run, are in the pool, taken, archived, filtered and dead; the rest: dropped."""

Harm = Callable[[Scene, str], object]


@pytest.fixture
def crowd(make_scene: Callable[..., Scene]) -> tuple[Scene, Mapping[str, list[str]]]:
    scene = make_scene(max_tries=1)
    scene.open_trainer()
    waiting, running, pool, taken, archived, filtered, dead = (
        int(GROUPS * part) for part in SHARES
    )
    for job in claimed(scene, filtered):
        scene.submit(job, filtered=True)
    for job in claimed(scene, dead):
        scene.run.jobs.release("w0", job, "failed")
        scene.run.jobs.resume_task("math")
    for step, size in enumerate((archived, taken), 1):
        for job in claimed(scene, size):
            scene.submit(job)
        scene.take(step, math=size)
    scene.run.ledger.commit(scene.trainer, 1, 1)
    for job in claimed(scene, pool):
        scene.submit(job)
    [*claimed(scene, running)]
    scene.enqueue(waiting)
    scene.enqueue(0, samples=[0] * (GROUPS - scene.run.jobs.cursor("math")))
    gids = [group_id("math", draw) for draw in range(GROUPS)]
    stages: dict[str, list[str]] = {}
    for gid, (stage,) in zip(gids, scene.run.account.stages_of(gids), strict=True):
        stages.setdefault(stage, []).append(gid)
    scene.check()
    return scene, stages


def claimed(scene: Scene, count: int) -> Iterator[Job]:
    while count:
        some = min(count, 20)
        scene.enqueue(some)
        yield from scene.claim(some)
        count -= some


def without_record(scene: Scene, gid: str) -> None:
    scene.raw.delete(scene.keys.group(gid))


def without_payload(scene: Scene, gid: str) -> None:
    scene.raw.delete(scene.keys.payload(gid, scene.record(gid)["payload"]))


def with_short_payload(scene: Scene, gid: str) -> None:
    scene.raw.set(scene.keys.payload(gid, scene.record(gid)["payload"]), b"x")


def with_unreadable_field(scene: Scene, gid: str) -> None:
    scene.raw.hset(scene.keys.group(gid), "samples", "?!")


def without_field(scene: Scene, gid: str) -> None:
    scene.raw.hdel(scene.keys.group(gid), "tries")


def with_an_end(scene: Scene, gid: str) -> None:
    scene.raw.setbit(scene.keys.ended("math", "dropped"), int(gid[-10:]), 1)


def without_its_end(scene: Scene, gid: str) -> None:
    for end in ENDS:
        scene.raw.setbit(scene.keys.ended("math", end), int(gid[-10:]), 0)


def among_the_dead(scene: Scene, gid: str) -> None:
    scene.raw.zadd(scene.keys.dead, {gid: 1})


def out_of_its_pool(scene: Scene, gid: str) -> None:
    scene.raw.zrem(scene.keys.pool("math", "completed"), f"{scene.record(gid)['arrival']}:{gid}")


def in_two_pools(scene: Scene, gid: str) -> None:
    scene.raw.zadd(scene.keys.pool("math", "expired"), {f"{scene.record(gid)['arrival']}:{gid}": 0})


def out_of_its_queue(scene: Scene, gid: str) -> None:
    scene.raw.xdel(scene.keys.jobs("math", "fresh"), scene.record(gid)["entry"])


def out_of_its_batch(scene: Scene, gid: str) -> None:
    key = scene.keys.batch("train", 2)
    line = next(line for line in scene.raw.lrange(key, 0, -1) if line.startswith(gid.encode()))
    scene.raw.lrem(key, 1, line)


def without_letter(scene: Scene, gid: str) -> None:
    scene.raw.delete(scene.keys.dead_letter(gid))


def not_held(scene: Scene, gid: str) -> None:
    scene.raw.hdel(scene.keys.leased("w0"), gid)


def with_late_payload(scene: Scene, gid: str) -> None:
    scene.raw.set(scene.keys.payload(gid, "late"), b"x")


LIVING: tuple[Harm, ...] = (without_record, with_unreadable_field, without_field, with_an_end)
ENDED: tuple[Harm, ...] = (without_its_end, among_the_dead)
HARMS: Mapping[str, tuple[Harm, ...]] = {
    "waiting": (*LIVING, out_of_its_queue, without_payload, among_the_dead),
    "running": (*LIVING, not_held, with_short_payload),
    "pool": (*LIVING, out_of_its_pool, in_two_pools, without_payload, with_short_payload),
    "taken": (*LIVING, out_of_its_batch, without_payload, among_the_dead),
    "dead": (*LIVING, without_letter),
    "archived": (*ENDED, with_late_payload),
    "filtered": (*ENDED, with_an_end),
    "dropped": ENDED,
}


@pytest.mark.parametrize("seed", range(2))
def test_fsck_names_the_damaged_groups_and_no_others(
    crowd: tuple[Scene, Mapping[str, list[str]]], seed: int
) -> None:
    scene, stages = crowd
    random = Random(seed)
    harmed = set()
    for stage, harms in HARMS.items():
        for harm in harms:
            gid = random.choice([gid for gid in stages[stage] if gid not in harmed])
            harm(scene, gid)
            harmed.add(gid)
    found = scene.run.account.fsck()
    texts = [f"{damage.gid} {damage.key} {damage.text}" for damage in found.damage]
    named = {match[0] for text in texts for match in re.finditer(GID.pattern, text)}
    assert named == harmed
    assert found.checked == GROUPS
