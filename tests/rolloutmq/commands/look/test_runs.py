from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from buffer.ids import new_nonce
from buffer.maintenance.remove_run import remove_run
from buffer.redis.keys import Keys
from buffer.redis.server.embedded import EmbeddedServer, valkey_binary
from buffer.redis.store import Store
from buffer.run.run import Run
from producer_workers.judges.rq_worker import FUNCTION, JudgeJob, JudgeWorker, open_queue
from rolloutmq.run_owner import own
from tests.buffer.scene import LIMITS
from tests.cluster import Cluster, start_cluster
from tests.rolloutmq.conftest import Command, in_process, json_of
from tests.rolloutmq.populate import Scene, populate, write_steps
from tests.servers import SAFE


def test_batch_shows_what_a_step_was_given(scene: Scene, command: Command) -> None:
    newest = json_of(command("batch", "--json"))
    manifest = scene.run.ledger.manifest(2)
    assert manifest is not None
    assert newest["step"] == 2
    assert [group["gid"] for group in newest["groups"]] == manifest.gids
    assert newest["groups"][0]["staleness"] == 1
    assert manifest.gids[0] in command("batch", "2").stdout
    for step, words in (("3", "has not been taken yet"), ("1", "has been freed")):
        done = command("batch", step)
        assert done.returncode == 2
        assert words in done.stderr


def test_runs_lists_every_run_and_removes_only_the_one_that_is_named(
    scene: Scene, store: Store, command: Command
) -> None:
    other = populate(store, "demo2")
    listed = json_of(command("runs", "--json"))
    assert [(line["run"], line["groups"], line["step"]) for line in listed] == [
        ("demo", 12, 2),
        ("demo2", 12, 2),
    ]
    assert "now" in command("runs").stdout
    refused = command("runs", "--delete", "demo", "--yes")
    assert (refused.returncode, "in use: the trainer" in refused.stderr) == (5, True)
    leave(scene)
    asked = command("runs", "--delete", "demo")
    assert (asked.returncode, "12 groups; nothing was changed" in asked.stderr) == (2, True)
    before = other.run.account.totals()
    assert command("runs", "--delete", "demo", "--yes").returncode == 0
    assert [key for key in store.client.scan_iter("rmq:{demo}:*")] == []
    assert other.run.account.totals() == before
    assert Run.names(store) == ["demo2"]


def test_the_files_of_a_run_go_with_it(store: Store, command: Command, tmp_path: Path) -> None:
    limits = LIMITS.model_copy(update={"columns": str(tmp_path / "columns")})
    first, second = (Run.create(store, name, new_nonce(), limits) for name in ("a", "b"))
    for run in (first, second):
        run.columns.put("math-0000000000", "ids.npy", np.arange(4, dtype="<i4"))
    assert command("runs", "--delete", "a", "--yes").returncode == 0
    assert [path.name for path in (tmp_path / "columns").iterdir()] == [f"b-{second.nonce}"]
    assert list(second.columns.gids()) == ["math-0000000000"]


def test_a_removed_run_takes_the_keys_of_its_judges_along_unless_one_lives(
    scene: Scene, store: Store, command: Command
) -> None:
    raw = store.client
    queues = {run: open_queue(raw, run, job_class=JudgeJob) for run in ("demo", "demo2")}
    for run, queue in queues.items():
        queue.enqueue(FUNCTION, job_id=f"{Keys(run).judge_jobs}a", args=("j", [], 1.0, 0))
    leave(scene)
    queue = queues["demo"]
    worker = JudgeWorker([queue], name=f"{queue.name}:w", connection=raw, job_class=JudgeJob)
    worker.register_birth()  # type: ignore[no-untyped-call]
    refused = command("runs", "--delete", "demo", "--yes")
    assert (refused.returncode, "in use: judge" in refused.stderr) == (5, True)
    worker.register_death()  # type: ignore[no-untyped-call]
    assert command("runs", "--delete", "demo", "--yes").returncode == 0
    left = sorted(key.decode() for key in raw.scan_iter("*"))
    assert left == [
        "rq:job:rmq-judge-demo2_-a",
        "rq:queue:rmq-judge:demo2",
        "rq:queues:rmq-judge:demo2",
    ]


def leave(scene: Scene) -> None:
    """Everybody is gone."""
    control = scene.run.store.client
    keys = scene.run.keys
    scene.run.control.renew_role("trainer", scene.trainer, closing=True)
    scene.run.control.renew_role("producer", scene.producer, closing=True)
    for worker in scene.workers:
        control.hset(keys.worker(worker), "seen_ms", 1)


class Cut(Exception):
    """The process that removes dies here."""


@pytest.mark.parametrize("calls", range(4))
def test_a_removal_that_was_cut_off_is_seen_and_repeated(
    scene: Scene, store: Store, command: Command, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave(scene)
    monkeypatch.setattr("buffer.maintenance.remove_run.KEYS_PER_TRIP", 10)
    left = iter(range(calls))

    def die(_: int) -> None:
        if next(left, None) is None:
            raise Cut

    with pytest.raises(Cut):
        remove_run(store, Keys("demo"), die)
    assert json_of(command("runs", "--json")) == [{"run": "demo", "mode": "incomplete"}]
    assert "being removed" in command("status", "--run", "demo").stderr
    assert command("runs", "--delete", "demo", "--yes").returncode == 0
    assert [*store.client.scan_iter("*")] == []


def test_a_run_in_a_cluster_is_removed(tmp_path: Any) -> None:
    with start_cluster(str(valkey_binary()), tmp_path, *SAFE) as cluster:
        store = Store(cluster.url, deadline_s=400.0)
        scene = populate(store)
        kept = populate(store, "demo2").run
        view = store.at(scene.run.keys.meta)
        assert len(nodes_with_keys(cluster, "demo")) == 1
        remove_run(view, Keys("demo"))
        assert nodes_with_keys(cluster, "demo") == []
        assert kept.account.fsck().clean
        store.close()


def nodes_with_keys(cluster: Cluster, name: str) -> list[Any]:
    """Those that hold a key of this run."""
    keys = {node.port: [key.decode() for key in node.ask("KEYS", "*")] for node in cluster.nodes}
    mine = (f"rmq:{{{name}}}", f"rmq:{{{name}:")
    return [node for node in cluster.nodes if any(key.startswith(mine) for key in keys[node.port])]


def test_drain_waits_for_the_last_group(scene: Scene, command: Command) -> None:
    done = command("drain", "--timeout", "0.1")
    assert done.returncode != 0
    assert "1 group still run" in done.stderr
    assert scene.run.control.state().mode == "drain"
    finishing = threading.Timer(0.3, lambda: scene.submit("w0", scene.running))
    finishing.start()
    assert "no group is running" in command("drain").stdout
    finishing.join()


def test_folders_are_listed_without_a_server_the_running_one_first(tmp_path: Path) -> None:
    assert json_of(in_process("runs", "--json", cwd=tmp_path)) == []
    old = tmp_path / "runs" / "old"
    with own(old, "old", ["old.toml"], 8):
        pass
    write_steps(old, [(1, "l1", ["math-1"]), (2, "l1", ["math-2"])])
    (old / "weights.bin").write_bytes(bytes(1000))
    (tmp_path / "runs" / "no-run").mkdir()
    with own(tmp_path / "runs" / "new", "new", ["new.toml"], 4):
        found = json_of(in_process("runs", "--json", cwd=tmp_path))
        assert [(line["run"], line["stage"], line["steps"]) for line in found] == [
            ("new", "preparing", 4),
            ("old", "finished", 8),
        ]
        assert found[1]["bytes"] > 1000
        assert (found[1]["step"], found[1]["reward"]) == (2, 0.2)
        text = in_process("runs", cwd=tmp_path, COLUMNS="").stdout
    assert "2 of 8" in text
    assert "[finished ]" in text
    assert in_process("runs", cwd=tmp_path, REDIS_URL="unix:///no.sock").returncode == 3


def test_a_command_asks_the_named_folder_then_the_environment_then_the_newest_folder(
    scene: Scene, server: EmbeddedServer, tmp_path: Path
) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "demo").symlink_to(server.folder)
    words = ("status", "--json")
    nowhere = "unix:///no.sock"
    assert json_of(in_process(*words, cwd=tmp_path))["run"] == "demo"
    assert in_process(*words, cwd=tmp_path, REDIS_URL=nowhere).returncode == 3
    named = (*words, "--run-dir", str(server.folder))
    assert json_of(in_process(*named, cwd=tmp_path, REDIS_URL=nowhere))["run"] == "demo"
    assert in_process(*named, "--redis-url", nowhere, cwd=tmp_path).returncode == 3
