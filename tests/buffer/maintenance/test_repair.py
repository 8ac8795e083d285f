"""A run that was damaged at random is repaired, and then finishes with a clean account."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from buffer.batches.position import Position
from buffer.errors import RoleHeld, SnapshotError, WireError
from buffer.maintenance.repair.repair import Plan, Repair
from buffer.rollouts.rollout import PolicyVersion, Status
from tests.buffer.checkpointing import Trainer
from tests.buffer.keyspace import exact, run_keys
from tests.buffer.scene import Scene

DRAWS = 12


class Story:
    """A run with groups of two tasks in all stages, and a trainer with checkpoints."""

    def __init__(self, scene: Scene, folder: Path) -> None:
        self.scene = scene
        self.folder = folder
        self.trainer = Trainer(scene)
        self.copies = 0
        for task in ("math", "code"):
            scene.enqueue(DRAWS, task=task, samples=[2] * (DRAWS - 1) + [0])
        jobs = {job.gid: job for job in scene.claim(2 * DRAWS - 2)}
        for task in ("math", "code"):
            own = [job for gid, job in jobs.items() if gid.startswith(task)]
            aborted, filtered, dead, back, running, *ready = own
            scene.submit(aborted, status=Status.ABORTED)
            scene.submit(filtered, filtered=True)
            scene.run.jobs.release("w0", dead, "failed")
            scene.run.jobs.release("w0", back, "handback")
            for job in ready:
                scene.submit(job)
            assert running
        for step in (1, 2, 3):
            self.trainer.train(step, math=1, code=1)
        self.trainer.save(keep=2)
        scene.take(4, math=1, code=1)
        scene.run.janitor.sweep()
        scene.check()
        self.leave()

    def leave(self) -> None:
        """All processes of the run are gone for long."""
        scene = self.scene
        scene.raw.hset(scene.keys.control, mapping={"trainer_seen_ms": 1, "producer_seen_ms": 1})
        scene.raw.zadd(scene.keys.workers, dict.fromkeys(("w0", "w1"), 1))
        scene.nonces.clear()
        scene.producer = ""

    def repair(self, position: Position | None = None) -> Repair:
        run = self.scene.run
        return Repair(run.store, run.keys, run.limits, run.nonce, position)

    def carry_out(self) -> Plan:
        self.copies += 1
        path = self.folder / f"copy-{self.copies}"
        return self.repair(self.trainer.checkpoints[3]).carry_out(path)

    def finish(self, steps: int = 9) -> None:
        """Train to the last step; `Position.add` raises where a group is trained twice."""
        scene = self.scene
        self.trainer.open(self.trainer.checkpoints[3])
        scene.run.control.publish_weights(scene.trainer, PolicyVersion("l1", 4), "/w/4", "sum")
        for step in range(4, steps + 1):
            while not self._train(step):
                self._produce(PolicyVersion("l1", 4))
            self.trainer.save()
        scene.check()

    def _train(self, step: int) -> bool:
        answer = self.scene.run.ledger.take(self.scene.trainer, step, {"math": 1, "code": 1})
        if not hasattr(answer, "gids"):
            return False
        self.trainer.position.add(answer)
        return True

    def _produce(self, weights: PolicyVersion) -> None:
        scene = self.scene
        for task in ("math", "code"):
            scene.run.jobs.reissue(scene.producer or scene.open_producer(), task, "aborted", 1000)
            scene.run.jobs.next_draw(scene.producer, task)
            scene.enqueue(2, task=task)
        for job in scene.claim(8, weights=weights):
            try:
                scene.submit(job, weights)
            except WireError:  # the bytes are of another group
                scene.run.jobs.release("w0", job, "failed")


@pytest.fixture
def story(make_scene: Callable[..., Scene], tmp_path: Path) -> Story:
    return Story(make_scene(max_tries=1, stale_threshold=20), tmp_path)


def test_plan_for_a_run_without_damage_is_empty(story: Story) -> None:
    plan = story.repair(story.trainer.checkpoints[3]).plan()
    print(plan)
    assert not (plan.lost or plan.closed)
    story.scene.raw.hset(story.scene.keys.control, "trainer", "")
    rest = story.carry_out()
    again = story.repair(story.trainer.checkpoints[3]).plan()
    assert again.values == {}, (again.values, rest.values)
    story.finish()


def names(story: Story, *prefixes: str) -> list[str]:
    start = story.scene.keys.prefix
    found = (key.removeprefix(start) for key in run_keys(story.scene.raw, story.scene.name))
    return sorted(name for name in found if name.startswith(prefixes))


FIXED = ("control", "lineages", "cursors", "leases", "dead", "bytes", "garbage", "workers", "clock")
BY_TASK = ("jobs:", "pool:", "ended:", "progress:", "ledger:", "batch:", "group:", "holds:")
KINDS = (*FIXED, *BY_TASK, "worker:", "payload:", "dead:", "age:")


def damage(story: Story, chance: random.Random) -> str:
    """Delete, rename, retype or change one key of any kind, or a value in it."""
    raw: Any = story.scene.raw
    kind = chance.choice(KINDS)
    found = names(story, kind)
    if not found:
        return ""
    name = chance.choice(found)
    key = story.scene.keys.prefix + name
    what = chance.choice(("delete", "rename", "retype", "value", "value", "value"))
    if what == "delete":
        raw.delete(key)
    elif what == "rename":
        other = chance.choice([*names(story, kind.split(":")[0]), name + "x"])
        raw.rename(key, story.scene.keys.prefix + other)
        what += f" to {other}"
    elif what == "retype":
        raw.delete(key)
        raw.sadd(key, "junk") if chance.random() < 0.5 else raw.set(key, "junk")
    else:
        what = change(raw, key, chance)
    return f"{name}: {what}"


def change(raw: Any, key: str, chance: random.Random) -> str:
    """Change a value in a key."""
    junk = chance.choice(["", "junk", "0", "1", "7", "-3", "9999"])
    match raw.type(key).decode():
        case "hash":
            field = chance.choice(sorted(raw.hkeys(key)))
            raw.hdel(key, field) if chance.random() < 0.4 else raw.hset(key, field, junk)
            return f"{field.decode()} = {junk!r}"
        case "zset":
            member = chance.choice(raw.zrange(key, 0, -1))
            raw.zrem(key, member)
            if chance.random() < 0.4:
                raw.zadd(key, {chance.choice([junk, member]): chance.choice([-1, 0, 3, 10**6])})
            return f"{member!r}"
        case "list":
            place = chance.randrange(raw.llen(key))
            raw.lset(key, place, junk)
            if chance.random() < 0.5:
                raw.lrem(key, 1, junk)
            return f"line {place} = {junk!r}"
        case "stream":
            entries = raw.xrange(key)
            entry = chance.choice(entries)[0] if entries else b"0-0"
            raw.xdel(key, entry)
            if chance.random() < 0.4:
                raw.xadd(key, {"gid": junk, "payload": "init"})
            return f"{entry!r}"
        case "string":
            if b"payload:" in key.encode() or chance.random() < 0.3:
                raw.set(key, raw.get(key)[:-1] or b"x")
                return "cut"
            bit = chance.randrange(DRAWS)
            raw.setbit(key, bit, 1 - raw.getbit(key, bit))
            return f"bit {bit}"
        case "set":
            raw.sadd(key, junk)
    return "member"


@pytest.mark.parametrize("seed", range(60))
def test_damaged_run_is_repaired_and_finishes_with_a_clean_account(story: Story, seed: int) -> None:
    chance = random.Random(seed)
    before = set(names(story, "group:"))
    done = [damage(story, chance) for _ in range(chance.choice((1, 1, 2, 4, 8)))]
    print(done)
    plan = story.carry_out()
    print(plan.notes, plan.lost, plan.closed)
    story.scene.check()
    gone = before - set(names(story, "group:"))
    assert gone <= {f"group:{gid}" for gid in [*plan.lost, *plan.closed]}, gone
    again = story.repair(story.trainer.checkpoints[3]).plan()
    print(again)
    assert again.values == {}
    story.finish()
