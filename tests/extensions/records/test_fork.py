from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import orjson
import pytest

from buffer.ids import group_id
from buffer.redis.server.embedded import EmbeddedServer
from buffer.redis.store import Store
from buffer.run.run import Run
from consumer.handle.checkpoint import CheckpointFolder
from consumer.handle.step_log import StepLog
from rolloutmq.config.config import Config
from rolloutmq.config.load import load_config
from rolloutmq.extensions.records import folders
from rolloutmq.extensions.records.fork import toml_lines
from tests.consumer.grpo.training_config import GROUPS
from tests.consumer.handle.crew import at_work
from tests.extensions.records.small_run import train_run
from tests.rolloutmq.conftest import in_process, rolloutmq
from tests.waits import until

LAST = 7
LONGER = ("--set", f"plan.steps={LAST}", "--set", "learner.learning_rate=0.01")


def fork(parent: Path, at: int, name: str, *args: str) -> Path:
    done = in_process("fork", str(parent), "--at", str(at), "--name", name, "--json", *args)
    assert done.returncode == 0, done.stderr
    return Path(orjson.loads(done.stdout)["config"])


def train(file: Path, model_dir: Path) -> Config:
    """Train a fork to its end, as `rolloutmq run` would."""
    config = load_config(file)
    with EmbeddedServer(config.run.folder / "server") as server:
        train_run(server.url, config, model_dir)
    return config


def digest(folder: Path) -> str:
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file() and "server" not in path.parts:
            found.update(str(path).encode() + path.read_bytes())
    return found.hexdigest()


def history(folder: Path) -> StepLog:
    log = StepLog(folder / "steps.jsonl")
    log.read_new()
    return log


def test_a_fork_goes_on_where_its_parent_was(trained: Config, model_dir: Path) -> None:
    parent = trained.run.folder
    before = digest(parent)
    child = train(fork(parent, 4, "b", *LONGER), model_dir)
    assert child.learner.learning_rate == 0.01
    log = history(child.run.folder)
    assert [step.step for step in log.steps] == list(range(1, LAST + 1))
    assert log.trained_twice() == {}
    assert [step.gids for step in log.steps[:4]] == [s.gids for s in history(parent).steps[:4]]
    assert digest(parent) == before

    checkpoint = CheckpointFolder(child.run.folder / "checkpoints").path(LAST)
    done = in_process("prove", str(checkpoint), "--json")
    assert done.returncode == 0, done.stdout
    found = orjson.loads(done.stdout)
    assert found["groups"] == {"math": LAST * GROUPS}
    assert "note" not in {check["level"] for check in found["checks"] if "archive" in check["what"]}

    grandchild = train(
        fork(child.run.folder, LAST - 1, "c", "--set", f"plan.steps={LAST}"), model_dir
    )
    assert history(grandchild.run.folder).steps[-1].step == LAST


def test_a_producer_before_the_trainer_draws_nothing_that_is_trained(trained: Config) -> None:
    child = load_config(fork(trained.run.folder, 4, "early"))
    known = CheckpointFolder(child.run.folder / "checkpoints").read(4).trained
    with EmbeddedServer(child.run.folder / "server") as server:
        run = Run.open(Store(server.url), child.run.name)
        with at_work(run, math=5 * GROUPS):
            until(lambda: run.buffer.count("math") >= GROUPS)
        made = run.buffer.peek(9 * GROUPS, "math")
        assert len(made) == GROUPS
        assert not [entry.gid for entry in made if entry.gid in known]
        assert run.account.fsck().clean


def test_the_same_fork_twice_and_two_at_once(trained: Config) -> None:
    parent = trained.run.folder
    with ThreadPoolExecutor() as threads:
        files = list(threads.map(lambda name: real_fork(parent, name), ("one", "two")))
    assert all(file.returncode == 0 for file in files), [file.stderr for file in files]
    again = in_process("fork", str(parent), "--at", "2", "--name", "one")
    assert again.returncode
    assert "exists" in again.stderr
    states = [CheckpointFolder(parent.with_name(n) / "checkpoints").read(2) for n in ("one", "two")]
    assert states[0].proof == states[1].proof
    assert states[0].run_nonce != states[1].run_nonce


def real_fork(parent: Path, name: str) -> subprocess.CompletedProcess[str]:
    return rolloutmq("fork", str(parent), "--at", "2", "--name", name)


def test_what_cannot_be_forked_is_said(trained: Config) -> None:
    done = in_process("fork", str(trained.run.folder), "--at", "3", "--name", "none")
    assert done.returncode
    assert "replay" in done.stderr


@pytest.mark.parametrize(
    "tree",
    [
        {"a": {"b": 1, "c": [1.5, 'x\n"y" é'], "d": {"e f": True, "g": {}}}},
        {"tasks": {"math.2": {"judge": "a:b", "dataset": {"kind": "jsonl", "path": "p\\q"}}}},
        {"a": {"list": [{"x": 1}, {"y": {"z": "w"}}]}},
    ],
)
def test_toml_reads_what_was_written(tree: dict[str, object]) -> None:
    assert tomllib.loads("\n".join(toml_lines(tree))) == tree


def test_a_fork_of_a_run_that_trains(tmp_path: Path, model_dir: Path) -> None:
    """Its next steps are those of a run that was never forked, and the forks are whole."""
    parent = tmp_path / "first"
    command = [sys.executable, "-m", "tests.extensions.records.processes", "live"]
    process = subprocess.Popen([*command, str(tmp_path), str(model_dir)])
    kept = CheckpointFolder(parent / "checkpoints")
    end = time.monotonic() + 400
    while 2 not in kept.steps() and time.monotonic() < end:
        assert process.poll() is None
        time.sleep(0.05)
    waiting = fork(parent, 2, "waiting")
    assert process.poll() is None
    (tmp_path / "go").touch()
    while 4 not in kept.steps() and time.monotonic() < end:
        time.sleep(0.01)
    training = fork(parent, 4, "training")
    assert process.wait(400) == 0

    steps = history(parent).steps
    assert [step.step for step in steps] == list(range(1, 9))
    assert {gid for step in steps[:4] for gid in step.gids} == {
        group_id("math", draw) for draw in range(4 * GROUPS)
    }
    done = in_process("replay", str(parent), "--json")
    assert done.returncode == 0, done.stderr
    assert orjson.loads(done.stdout)["differing_tensor"] == ""
    for file, at in ((waiting, 2), (training, 4)):
        child = train(file, model_dir)
        log = history(child.run.folder)
        assert [step.gids for step in log.steps[:at]] == [step.gids for step in steps[:at]]
        assert [step.step for step in log.steps] == list(range(1, 9))
        assert log.trained_twice() == {}


def test_a_checkpoint_that_is_deleted_meanwhile_is_no_fork(
    trained: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent = tmp_path / "first"
    shutil.copytree(trained.run.folder, parent, ignore=shutil.ignore_patterns("server"))
    link = folders.link_file

    def late(source: str | Path, target: str | Path) -> None:
        link(source, target)
        CheckpointFolder(parent / "checkpoints").prune(1)

    monkeypatch.setattr(folders, "link_file", late)
    done = in_process("fork", str(parent), "--at", "2", "--name", "none")
    assert done.returncode == 2
    assert "meanwhile" in done.stderr
    assert not CheckpointFolder(tmp_path / "none" / "checkpoints").steps()


def test_half_a_line_of_a_log_is_left_out(trained: Config, tmp_path: Path) -> None:
    parent = tmp_path / "first"
    shutil.copytree(trained.run.folder, parent, ignore=shutil.ignore_patterns("server"))
    log = parent / "steps.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join([*lines[:2], lines[2][:40], b"\n", *lines[2:], lines[4][:30]]))
    fork(parent, 5, "torn")
    entries = [orjson.loads(line) for line in lines]
    assert "cost/worker_gpu_hours" in entries[0]["metrics"]
    for entry in entries:  # the fork pays for its own hours
        entry["metrics"] = {n: v for n, v in entry["metrics"].items() if not n.startswith("cost/")}
    copied = (tmp_path / "torn" / "steps.jsonl").read_bytes().splitlines()
    assert [orjson.loads(line) for line in copied] == entries
