"""`rolloutmq fsck --repair` shows, repairs and takes back."""

from __future__ import annotations

from pathlib import Path

from buffer.model.ids import group_id
from buffer.redis.server.embedded import EmbeddedServer
from buffer.redis.store import Store
from tests.buffer.keyspace import dump
from tests.rolloutmq.conftest import Command, json_of
from tests.rolloutmq.populate import Scene


def leave(store: Store, scene: Scene) -> None:
    """All processes of the run are gone for long."""
    keys = scene.run.keys
    store.control.hset(keys.control, mapping={"trainer_seen_ms": 1, "producer_seen_ms": 1})
    for worker in store.control.zrange(keys.workers, 0, -1):
        store.control.zadd(keys.workers, {worker: 1})


def test_lost_settings_of_a_run_with_groups_come_back_by_one_command(
    scene: Scene, store: Store, command: Command
) -> None:
    """A value that was changed since the run was created comes back, too."""
    keys = scene.run.keys
    command("set", "math.weight=3")
    before = dump(store.control, scene.run.name)
    store.control.delete(keys.meta)
    refused = command("status")
    assert refused.returncode == 5
    assert f"fsck --repair --run {scene.run.name}" in refused.stderr
    assert f"{keys.meta} is gone" in command("fsck").stdout
    leave(store, scene)
    assert command("fsck", "--repair", "--yes").returncode == 0
    after = dump(store.control, scene.run.name)
    assert after["meta"] == after["meta:copy"] == before["meta"]
    store.control.delete(keys.meta, keys.meta_copy)
    lost = command("fsck", "--repair")
    assert lost.returncode == 5
    assert "restore the data of the server" in lost.stderr


def test_repair_is_shown_then_done_then_taken_back(
    scene: Scene, store: Store, server: EmbeddedServer, command: Command
) -> None:
    keys = scene.run.keys
    assert "nothing to repair" in command("fsck", "--repair").stdout
    store.control.delete(keys.pool("math", "completed"), keys.ledger("train"))
    store.control.delete(keys.group(group_id("math", 3)))
    before = dump(store.control, scene.run.name)

    shown = command("fsck", "--repair")
    assert shown.returncode == 2
    assert "nothing was changed" in shown.stderr
    assert "drawn again: math-0000000003" in shown.stdout
    assert "ledger:train" in shown.stdout
    refused = command("fsck", "--repair", "--yes")
    assert refused.returncode == 5
    assert "was alive" in refused.stderr
    assert dump(store.control, scene.run.name) == before

    leave(store, scene)
    before = dump(store.control, scene.run.name)
    done = json_of(command("fsck", "--repair", "--yes", "--json"))
    assert done["clean"]
    assert done["repair"]["drawn_again"] == ["math-0000000003"]
    copy = Path(done["repair"]["copy"])
    assert copy.parent == server.folder / "repairs"
    assert "nothing to repair" in command("fsck", "--repair", "--yes").stdout

    assert command("fsck", "--undo", str(copy)).returncode == 2
    assert command("fsck", "--undo", str(copy), "--yes").returncode == 6
    assert dump(store.control, scene.run.name) == before
