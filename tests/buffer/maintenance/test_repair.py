"""A run that was damaged at random is repaired, and then finishes with a clean account."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from buffer.errors import RoleHeld, SnapshotError
from buffer.ledger.position import Position
from buffer.maintenance.repair import repair
from buffer.maintenance.repair.image import Image, read_image
from buffer.maintenance.repair.repair import Plan, Repair
from buffer.run import Run
from tests.buffer.keyspace import exact, run_keys
from tests.buffer.scene import FIRST, Scene
from tests.buffer.story import DRAWS, Story


class Repaired(Story):
    """A story that is repaired; the copies go to `folder`."""

    def __init__(self, scene: Scene, folder: Path) -> None:
        super().__init__(scene)
        self.folder = folder
        self.copies = 0

    def repair(self, position: Position | None = None) -> Repair:
        run = self.scene.run
        return Repair(run.store, run.keys, run.limits, run.nonce, position)

    def carry_out(self) -> Plan:
        self.copies += 1
        path = self.folder / f"copy-{self.copies}"
        return self.repair(self.trainer.checkpoints[3]).carry_out(path)


@pytest.fixture
def story(make_scene: Callable[..., Scene], tmp_path: Path) -> Repaired:
    return Repaired(make_scene(max_tries=1, stale_threshold=20), tmp_path)


def test_run_without_damage_is_left_as_it_is(story: Repaired) -> None:
    for position in (story.trainer.checkpoints[3], None):
        plan = story.repair(position).plan()
        assert (plan.damaged, plan.payloads, plan.lost, plan.closed) == ([], [], [], [])
    story.carry_out()
    story.finish()


def test_repair_is_refused_while_a_process_of_the_run_is_alive(story: Repaired) -> None:
    scene = story.scene
    moves: list[Callable[[], object]] = [scene.worker, scene.open_producer, story.trainer.open]
    for open_one in moves:
        open_one()
        before = exact(scene.raw, scene.name)
        with pytest.raises(RoleHeld, match="was alive"):
            story.carry_out()
        assert exact(scene.raw, scene.name) == before
        story.leave()


def test_repair_changes_nothing_where_the_run_changes_meanwhile(
    story: Repaired, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that was silent for long submits while the plan is made."""
    scene = story.scene
    scene.raw.delete(scene.keys.pool("math", "completed"))

    def read(*args: Any) -> Image:
        image = read_image(*args)
        scene.raw.hincrby(scene.keys.progress("math"), "produced_samples", 1)
        return image

    monkeypatch.setattr(repair, "read_image", read)
    with pytest.raises(RoleHeld, match="by another process"):
        story.carry_out()
    assert not scene.raw.exists(scene.keys.pool("math", "completed"))


def test_repair_can_be_undone_until_the_run_is_opened(story: Repaired) -> None:
    scene = story.scene
    damaged = [damage(story, random.Random(seed)) for seed in range(9)]
    before = scene.dump()
    story.carry_out()
    copy = story.folder / "copy-1"
    assert scene.dump() != before, damaged
    story.repair().undo(copy)
    assert scene.dump() == before
    with pytest.raises(SnapshotError, match="cannot be put back"):
        story.repair().undo(copy)
    story.carry_out()
    scene.open_producer()
    with pytest.raises(SnapshotError, match="opened since"):
        story.repair().undo(story.folder / "copy-2")


def test_nothing_is_trained_twice_where_no_checkpoint_is_known(story: Repaired) -> None:
    """What was archived is not known any more: what is missing is closed."""
    scene = story.scene
    scene.raw.delete(scene.keys.ended("math", "archived"))
    scene.raw.delete(scene.keys.group(story.ready("math")[-1]))
    plan = story.repair().carry_out(story.folder / "copy")
    assert len(plan.closed) == 3  # two batches were archived
    assert plan.lost == []
    story.finish()


def test_manifest_that_is_gone_becomes_a_new_revision(story: Repaired) -> None:
    scene = story.scene
    known = scene.run.ledger.recorded(3)
    gone = scene.run.ledger.recorded(4)
    for step in (3, 4):
        scene.raw.delete(scene.keys.batch("train", step))
    story.carry_out()
    assert scene.run.ledger.recorded(3) == known  # as the checkpoint has it
    rebuilt = scene.run.ledger.recorded(4)
    assert set(rebuilt.entries) == set(gone.entries)
    assert rebuilt.revision == 1
    story.finish()


def test_run_without_its_settings_is_created_again_and_repaired(story: Repaired) -> None:
    scene = story.scene
    scene.raw.delete(scene.keys.meta, scene.keys.control)
    Run.create(scene.store, scene.name, scene.run.nonce, scene.run.limits, FIRST, "/weights/0")
    story.carry_out()
    story.finish()


def names(story: Repaired, *prefixes: str) -> list[str]:
    start = story.scene.keys.prefix
    found = (key.removeprefix(start) for key in run_keys(story.scene.raw, story.scene.name))
    return sorted(name for name in found if name.startswith(prefixes))


FIXED = ("control", "lineages", "cursors", "leases", "dead", "bytes", "garbage", "workers", "clock")
BY_TASK = ("jobs:", "pool:", "ended:", "progress:", "ledger:", "batch:", "group:", "holds:")
KINDS = (*FIXED, *BY_TASK, "worker:", "payload:", "dead:", "age:")


def damage(story: Repaired, chance: random.Random) -> str:
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
    kind = raw.type(key).decode()
    if kind == "set":
        raw.sadd(key, junk)
        return "member"
    moves = {
        "hash": change_hash,
        "zset": change_zset,
        "list": change_list,
        "stream": change_stream,
        "string": change_string,
    }
    return moves[kind](raw, key, chance, junk)


def change_hash(raw: Any, key: str, chance: random.Random, junk: str) -> str:
    field = chance.choice(sorted(raw.hkeys(key)))
    raw.hdel(key, field) if chance.random() < 0.4 else raw.hset(key, field, junk)
    return f"{field.decode()} = {junk!r}"


def change_zset(raw: Any, key: str, chance: random.Random, junk: str) -> str:
    member = chance.choice(raw.zrange(key, 0, -1))
    raw.zrem(key, member)
    if chance.random() < 0.4:
        raw.zadd(key, {chance.choice([junk, member]): chance.choice([-1, 0, 3, 10**6])})
    return f"{member!r}"


def change_list(raw: Any, key: str, chance: random.Random, junk: str) -> str:
    place = chance.randrange(raw.llen(key))
    raw.lset(key, place, junk)
    if chance.random() < 0.5:
        raw.lrem(key, 1, junk)
    return f"line {place} = {junk!r}"


def change_stream(raw: Any, key: str, chance: random.Random, junk: str) -> str:
    entries = raw.xrange(key)
    entry = chance.choice(entries)[0] if entries else b"0-0"
    raw.xdel(key, entry)
    if chance.random() < 0.4:
        raw.xadd(key, {"gid": junk, "payload": "init"})
    return f"{entry!r}"


def change_string(raw: Any, key: str, chance: random.Random, junk: str) -> str:
    if "payload:" in key or chance.random() < 0.3:
        raw.set(key, raw.get(key)[:-1] or junk)
        return "cut"
    bit = chance.randrange(DRAWS)
    raw.setbit(key, bit, 1 - raw.getbit(key, bit))
    return f"bit {bit}"


@pytest.mark.parametrize("seed", range(8))
def test_damaged_run_is_repaired_and_finishes_with_a_clean_account(
    story: Repaired, seed: int
) -> None:
    chance = random.Random(seed)
    before = set(names(story, "group:"))
    trained = story.trainer.checkpoints[3].trained
    done = [damage(story, chance) for _ in range(chance.choice((1, 1, 2, 4, 8)))]
    plan = story.carry_out()
    story.scene.check()
    gone = before - set(names(story, "group:"))
    # a batch that cannot be delivered any more is archived where it was trained
    gone = {name for name in gone if name.removeprefix("group:") not in trained}
    assert gone <= {f"group:{gid}" for gid in [*plan.lost, *plan.closed]}, (gone, done)
    again = story.repair(story.trainer.checkpoints[3]).plan()
    assert again.damaged == [], done
    story.finish()
