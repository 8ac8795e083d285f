"""`save` and `restore` from the command line."""

from __future__ import annotations

from pathlib import Path

from buffer.control.control import Mode
from buffer.redis.store import Store
from buffer.run.run import Run
from tests.rolloutmq.conftest import Command, json_of
from tests.rolloutmq.populate import Scene


def test_save_and_restore_under_another_name(
    scene: Scene, store: Store, command: Command, tmp_path: Path
) -> None:
    done = command("save", str(tmp_path / "s"))
    assert "add --pause" in done.stderr
    for worker in scene.workers:
        scene.run.fleet.fence(worker)
    done = command("save", str(tmp_path / "s"))
    assert done.stdout.startswith("run demo: "), done.stderr
    done = command("restore", str(tmp_path / "s"), "--run", "again")
    assert done.stdout.startswith("run again: "), done.stderr
    assert json_of(command("fsck", "--run", "again", "--json"))["clean"]


def test_pause_ends_with_the_command_and_comes_back_with_the_run(
    scene: Scene, store: Store, command: Command, tmp_path: Path
) -> None:
    for worker in scene.workers:
        scene.run.fleet.fence(worker)
    assert command("save", str(tmp_path / "s"), "--pause").returncode == 0
    assert scene.run.control.state().mode is Mode.RUN
    done = command("restore", str(tmp_path / "s"), "--run", "again")
    assert "paused (drain)" in done.stdout
    assert Run.open(store, "again").control.state().mode is Mode.DRAIN


def test_pause_of_somebody_else_is_left_alone(
    scene: Scene, command: Command, tmp_path: Path
) -> None:
    scene.run.control.set_mode("operator", Mode.DRAIN)
    for worker in scene.workers:
        scene.run.fleet.fence(worker)
    assert command("save", str(tmp_path / "s"), "--pause").returncode == 0
    assert scene.run.control.state().mode is Mode.DRAIN


def test_refusals_are_one_clear_error(scene: Scene, command: Command, tmp_path: Path) -> None:
    (tmp_path / "notes").touch()
    done = command("save", str(tmp_path))
    assert (done.returncode, done.stdout) == (1, "")
    assert "not an empty folder" in done.stderr
    done = command("restore", str(tmp_path))
    assert (done.returncode, done.stdout) == (1, "")
    assert "is not a snapshot" in done.stderr
    for worker in scene.workers:
        scene.run.fleet.fence(worker)
    command("save", str(tmp_path / "s"))
    done = command("restore", str(tmp_path / "s"))
    assert (done.returncode, done.stdout) == (5, "")
    assert "the server has a run 'demo'" in done.stderr
