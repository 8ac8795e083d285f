"""`export` and `import` from the command line."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any, cast

import orjson

from buffer.control.control import Mode
from buffer.manifest import Manifest
from buffer.redis.store import Store
from buffer.run.run import Run
from tests.rolloutmq.conftest import Command, json_of
from tests.rolloutmq.populate import Scene


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [orjson.loads(line) for line in path.read_bytes().splitlines()]


def test_export_choose_and_import(scene: Scene, command: Command, tmp_path: Path) -> None:
    done = command("export", str(tmp_path / "all.jsonl"))
    assert done.returncode == 0, done.stderr
    assert "2 groups with 4 rollouts written" in done.stdout
    lines = (tmp_path / "all.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "chosen.jsonl").write_bytes(b"".join(lines[:2]))
    done = command("import", str(tmp_path / "chosen.jsonl"))
    assert done.stdout.startswith("1 group with 2 rollouts imported")
    facts = json_of(command("fsck", "--json"))
    assert facts["clean"]
    assert facts["checked"] == 13
    assert facts["tasks"]["math"]["imported"] == 1
    assert "imported" in command("fsck").stdout
    assert "imported" in command("status").stdout
    # the weights that made it are too old by now
    assert "1 of them are too old" in done.stdout
    assert json_of(command("show", "math-0033554432", "--json"))["places"] == ["dropped"]
    young = [orjson.dumps(orjson.loads(line) | {"spans": []}) for line in lines[:2]]
    (tmp_path / "chosen.jsonl").write_bytes(b"\n".join(young))
    assert "too old" not in command("import", str(tmp_path / "chosen.jsonl")).stdout
    assert json_of(command("show", "math-0033554433", "--json"))["places"] == ["pool"]
    done = command("show", "math-0033554434")
    assert (done.returncode, "has not been imported" in done.stderr) == (2, True)


def test_mistakes_are_one_clear_error(scene: Scene, command: Command, tmp_path: Path) -> None:
    path = tmp_path / "f.jsonl"
    for options, words in (
        (("export", str(path), "--status", "done"), "no status 'done'"),
        (("export", str(path), "--task", "chess"), "no task 'chess'"),
        (("import", str(path)), "cannot be read"),
        (("export", str(path), "--where", "{"), "--where is not valid JSON"),
        (("export", str(path), "--where", '{"color": 1}'), "no field 'color'"),
        (("export", str(path), "--archived", "--task", "math"), "whole batches"),
        (("export", str(path), "--follow"), "keeps no trained batch"),
    ):
        done = command(*options)
        assert (done.returncode, done.stdout) == (2, "")
        assert words in done.stderr
    path.write_bytes(orjson.dumps({"gid": "a"}))
    done = command("import", str(path))
    assert (done.returncode, done.stdout) == (2, "")
    assert "f.jsonl, line 1: response_ids: Field required" in done.stderr


def test_export_by_question(scene: Scene, command: Command, tmp_path: Path) -> None:
    for number, (where, groups) in enumerate(
        [
            ('{"stage": "taken"}', 1),
            ('{"status": "aborted"}', 1),
            ('{"$or": [{"status": "aborted"}, {"reward": {"$gte": 0.5}}]}', 3),
            ('{"tries": {"$gt": 9}}', 0),
        ]
    ):
        path = tmp_path / f"{number}.jsonl"
        done = json_of(command("export", str(path), "--where", where, "--json"))
        assert (done["groups"], len({row["gid"] for row in lines_of(path)})) == (groups, groups)
    both = command(
        "export",
        str(tmp_path / "f.jsonl"),
        "--where",
        '{"stage": "pool"}',
        "--status",
        "aborted",
        "--json",
    )
    assert json_of(both)["groups"] == 1


def test_export_names_what_it_cannot_read_and_goes_on(
    scene: Scene, command: Command, tmp_path: Path
) -> None:
    run = scene.run
    client = cast(Any, scene.run.store.client)
    ready = {row.gid: run.record(row.gid) for row in run.groups.find({"status": "completed"})}
    (gone, record), (kept, _) = sorted(ready.items())
    client.delete(run.keys.payload(gone, record["payload"]))
    done = command("export", str(tmp_path / "f.jsonl"))
    assert (done.returncode, "1 group with 2 rollouts written" in done.stdout) == (0, True)
    assert "1 group left out, because unreadable" in done.stdout
    assert f"{gone}: group {gone}: 1 of 1 chunks are gone" in done.stdout
    assert {row["gid"] for row in lines_of(tmp_path / "f.jsonl")} == {kept}
    client.set(run.keys.payload(gone, record["payload"]), b"x" * int(record["size"]))
    told = json_of(command("export", str(tmp_path / "g.jsonl"), "--json"))
    assert (told["groups"], list(told["unreadable"])) == (1, [gone])
    assert "checksum" in told["unreadable"][gone]


def test_export_of_failed_groups_is_not_stopped_by_what_killed_them(
    scene: Scene, command: Command, tmp_path: Path
) -> None:
    path = tmp_path / "f.jsonl"
    (dead,) = (row.gid for row in scene.run.groups.find({"status": "failed"}))
    assert json_of(command("export", str(path), "--status", "failed", "--json"))["groups"] == 1
    cast(Any, scene.run.store.client).delete(scene.run.keys.payload(dead, "init"))
    path.unlink()
    assert list(
        json_of(command("export", str(path), "--status", "failed", "--json"))["unreadable"]
    ) == [dead]


def test_export_of_archived_batches_frees_them(
    store: Store, command: Command, tmp_path: Path
) -> None:
    scene = Scene(store, "demo", retain_until_exported=True, stale_threshold=9)
    scene.enqueue(4)
    scene.join("w0")
    for job in scene.claim("w0", 4):
        scene.submit("w0", job)
    scene.open_trainer()
    ledger = scene.run.ledger
    taken = [ledger.take(scene.trainer, step, {"math": 1}) for step in (1, 2)]
    ledger.commit(scene.trainer, 2, 2)
    scene.run.janitor.sweep()
    assert ledger.archive.steps() == range(1, 3)
    done = command("export", str(tmp_path / "a.jsonl"), "--archived")
    assert "2 groups with 4 rollouts of steps 1 to 2 written" in done.stdout
    lines = lines_of(tmp_path / "a.jsonl")
    assert [row["gid"] for row in lines[::2]] == [
        manifest.gids[0] for manifest in taken if isinstance(manifest, Manifest)
    ]
    assert {(row["stage"], row["status"]) for row in lines} == {("archived", "completed")}
    assert ledger.archive.steps() == range(3, 3)
    done = command("export", str(tmp_path / "b.jsonl"), "--archived")
    assert (done.returncode, "no file was written" in done.stdout) == (0, True)
    assert (
        json_of(command("export", str(tmp_path / "b.jsonl"), "--archived", "--json"))["steps"] == []
    )
    assert not (tmp_path / "b.jsonl").exists()
    ledger.take(scene.trainer, 3, {"math": 1})
    ledger.commit(scene.trainer, 3, 3)
    told = json_of(command("export", str(tmp_path / "b.jsonl"), "--archived", "--json"))
    assert (told["groups"], told["steps"]) == (1, [3, 3])
    assert json_of(command("fsck", "--json"))["clean"]


def test_export_follows_a_run_and_replaces_the_file_of_one_that_died_before_it_was_marked(
    store: Store, command: Command, tmp_path: Path
) -> None:
    scene = Scene(store, "demo", retain_until_exported=True, stale_threshold=9)
    scene.open_trainer()
    scene.join("w0")

    scene.enqueue(2)
    for job in scene.claim("w0", 2):
        scene.submit("w0", job)

    def commit(step: int) -> None:
        scene.run.ledger.take(scene.trainer, step, {"math": 1})
        scene.run.ledger.commit(scene.trainer, step, step)

    commit(1)
    tmp_path.joinpath("step_0000001.jsonl").write_text("of a process that died\n")

    def train_on() -> None:
        # a listening client is blocked: from then on, an event proves that it was followed
        while not scene.run.store.client.info("clients")["blocked_clients"]:
            time.sleep(0.02)
        commit(2)
        while scene.run.ledger.archive.steps():
            time.sleep(0.02)
        scene.run.control.set_mode("operator", Mode.FINISH)

    trainer = threading.Thread(target=train_on)
    trainer.start()
    done = command("export", str(tmp_path), "--follow", "--json")
    trainer.join()
    assert json_of(done)["steps"] == [1, 2]
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["step_0000001.jsonl", "step_0000002.jsonl"]
    gids = [orjson.loads(line)["gid"] for file in files for line in file.read_bytes().splitlines()]
    assert len(set(gids)) == 2
    assert scene.run.ledger.archive.steps() == range(3, 3)


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
