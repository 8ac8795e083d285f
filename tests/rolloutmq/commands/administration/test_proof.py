from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest

from buffer.control.control import Mode
from buffer.control.task_status import TaskStop
from buffer.ids import group_id
from buffer.redis.server.embedded import EmbeddedServer
from buffer.redis.store import Store
from rolloutmq.views.explain.diagnosis import diagnose
from rolloutmq.views.run_view import read_run_view
from tests.rolloutmq.conftest import Command, in_process, json_of
from tests.rolloutmq.populate import Scene, write_steps


def gid(draw: int) -> str:
    return group_id("math", draw)


@pytest.fixture
def folder(server: EmbeddedServer) -> Iterator[Path]:
    """The run's folder, without a step log before and after."""
    yield server.folder
    (server.folder / "steps.jsonl").unlink(missing_ok=True)


def test_fsck_of_a_sound_run(scene: Scene, command: Command) -> None:
    found = json_of(command("fsck", "--json"))
    assert found["clean"]
    assert found["checked"] == 12
    assert (found["lost"], found["doubled"], found["trained_twice"]) == ([], [], {})
    assert found["trained_steps"] is None
    assert found["could_lose"] == []
    assert "0 of 12 groups are lost" in command("fsck").stdout


def test_fsck_finds_a_lost_group(scene: Scene, store: Store, command: Command) -> None:
    keys = scene.run.keys
    store.client.zrem(
        keys.pool("math", "completed"), *store.client.zrange(keys.pool("math", "completed"), 0, -1)
    )
    done = command("fsck", "--json")
    assert done.returncode == 6
    assert f'"{gid(3)}"' in done.stdout
    assert "1 group lost" in done.stderr
    assert "[BAD]" in command("fsck").stdout


def test_fsck_finds_a_doubled_group(scene: Scene, store: Store, command: Command) -> None:
    store.client.setbit(scene.run.keys.ended("math", "archived"), 3, 1)
    done = command("fsck", "--json")
    assert done.returncode == 6
    assert f"{gid(3)} (pool, archived)" in done.stdout


def test_fsck_finds_a_group_trained_twice(scene: Scene, folder: Path, command: Command) -> None:
    write_steps(folder, [(1, "l1", [gid(0), gid(1)]), (2, "l1", [gid(2), gid(1)])])
    done = command("fsck", "--json")
    assert done.returncode == 6
    assert gid(1) in done.stdout
    assert "1 trained twice" in done.stderr


def test_fsck_takes_a_replayed_step_for_one(scene: Scene, folder: Path, command: Command) -> None:
    write_steps(folder, [(1, "l1", [gid(0), gid(1)]), (2, "l1", [gid(2)]), (2, "l2", [gid(2)])])
    found = json_of(command("fsck", "--json"))
    assert (found["trained_steps"], found["replayed_steps"], found["trained_twice"]) == (2, 1, {})
    assert "1 step replaced" in " ".join(command("fsck").stdout.split())


def test_fsck_finds_the_runs_folder_by_its_nonce(
    scene: Scene, server: EmbeddedServer, tmp_path: Path, command: Command
) -> None:
    for name, nonce in (("a", "of-another-run"), ("b", scene.run.nonce)):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        (folder / "run.json").write_bytes(orjson.dumps({"nonce": nonce}))
        write_steps(folder, [(1, "l1", [gid(0)])] * (1 if name == "b" else 2))
    found = json_of(command("fsck", "--json", "--redis-url", server.url, cwd=tmp_path))
    assert (found["trained_steps"], found["replayed_steps"]) == (1, 0)
    other = json_of(
        command("fsck", "--json", "--redis-url", server.url, "--run-dir", "runs/a", cwd=tmp_path)
    )
    assert other["trained_steps"] is None


def test_doctor_of_a_sound_run(scene: Scene, command: Command) -> None:
    found = json_of(command("doctor", "--json"))
    assert {finding["level"] for finding in found["findings"]} == {"ok"}
    assert {symptom["level"] for symptom in found["runs"]["demo"]} == {"note"}
    assert "nothing stops this run" in command("doctor").stdout


def test_doctor_refuses_a_server_that_would_lose_data(tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path) as server:
        with server.connect() as client:
            client.config_set("maxmemory-policy", "allkeys-lru")
        done = in_process("doctor", "--redis-url", server.url)
    assert done.returncode == 3
    assert "allkeys-lru" in done.stdout
    assert "is not safe for a run" in done.stderr


def test_doctor_names_a_task_whose_data_set_is_broken_until_it_is_mended(
    scene: Scene, command: Command
) -> None:
    scene.run.task_stops.publish(
        scene.producer, "math", TaskStop("broken", 0, "math: row 7 cannot be read")
    )
    (found,) = [
        s for s in json_of(command("doctor", "--json"))["runs"]["demo"] if "row 7" in s["what"]
    ]
    assert (found["level"], found["what"]) == (
        "stuck",
        "task math is stopped: math: row 7 cannot be read",
    )
    assert "rolloutmq resume --task math" in found["fix"]
    command("resume", "--task", "math")
    assert "row 7" not in command("doctor").stdout


def _found(scene: Scene) -> str:
    return " | ".join(
        symptom.what for symptom in diagnose(read_run_view(scene.run)) if symptom.level == "stuck"
    )


def test_diagnosis_of_silent_roles(store: Store) -> None:
    scene = Scene(store, "demo", role_timeout_ms=0)
    scene.enqueue(1)
    scene.open_trainer()
    assert "the trainer is silent" in _found(scene)
    assert "the producer is silent" in _found(scene)
    scene.run.control.renew_role("producer", scene.producer, closing=True)
    assert "the producer has left" in _found(scene)


def test_diagnosis_of_a_producer_that_enqueues_nothing(store: Store) -> None:
    scene = Scene(store, "demo")
    scene.enqueue(1)
    scene.join("w0")
    scene.submit("w0", scene.claim("w0", 1)[0], filtered=True)
    scene.open_trainer()
    # right after a result, the producer may only not have seen yet that there is room
    assert "none waits or runs" not in _found(scene)
    client = scene.run.store.client
    seconds, _ = client.time()
    client.delete(scene.run.keys.events)
    client.xadd(scene.run.keys.events, {"kind": "filtered"}, id=f"{1000 * (seconds - 31)}-0")
    assert _found(scene) == "math: 0 of 1 groups are ready, none waits or runs"


def test_diagnosis_of_a_trainers_pause_names_the_late(scene: Scene) -> None:
    state = scene.run.control.set_mode("trainer", Mode.KEEP, nonce=scene.trainer)
    scene.beat("w0", ack=state.epoch)
    notes = [symptom.what for symptom in diagnose(read_run_view(scene.run))]
    assert any("for a weight update; it waits for w1" in note for note in notes)
