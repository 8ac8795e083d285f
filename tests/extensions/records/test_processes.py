"""Replays and scores on two ranks, and commands that are killed at any operation."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson
import psutil
import pytest

from consumer.handle.checkpoint import CheckpointFolder
from consumer.handle.step_log import read_steps
from rolloutmq.config.config import Config
from rolloutmq.extensions.records.replay import OF_THE_MACHINE
from tests.consumer.grpo.training_config import STEPS
from tests.rolloutmq.conftest import in_process

JUDGE = "tests.extensions.records.other_judge:reversed_score"
TIMES = (*OF_THE_MACHINE, "system/")
JUDGED = ("--from", "2", "--task", "math", "--judge", JUDGE, "--yes")


def processes(*args: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.extensions.records.processes", *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr
    return dict(orjson.loads(done.stdout))


def test_what_two_ranks_trained_is_equal_on_two(tmp_path: Path, model_dir: Path) -> None:
    found = processes("two_ranks", str(tmp_path), str(model_dir))
    for name in ("two", "part", "bundle"):
        assert found[name]["code"] == 0, found[name]
        assert found[name]["ranks"] == 2
        assert found[name]["differing"] == found[name]["other_ranks"] == {}
        assert found[name]["state"] == found["two"]["state"]
    assert found["two"]["differing_tensor"] == found["part"]["differing_tensor"] == ""
    assert found["one"]["other_ranks"] == {str(step): 2 for step in range(1, STEPS + 1)}
    assert found["rescored"]["code"] == 0
    assert found["rescored"]["state"] == found["again"]["state"] != found["two"]["state"]


@pytest.mark.parametrize(
    ("deaths", "args"),
    [
        (
            "judge.json:1,archive:1,archive:9,archive:15,replayed:2,steps.jsonl:2,checkpoints:4",
            ("rescore", *JUDGED),
        ),
        ("replayed:2,checkpoints:1,steps.jsonl:3,checkpoints:4", ("replay", "--from", "2")),
        (
            "run.json:1,checkpoints:2,steps.jsonl:1,archive:2,terms:1,config.toml:1,server:4",
            ("fork", "--at", "4"),
        ),
    ],
    ids=["rescore", "replay", "fork"],
)
def test_a_command_that_died_comes_to_the_result_of_one_that_did_not(
    trained: Config, tmp_path: Path, deaths: str, args: tuple[str, ...]
) -> None:
    parent = tmp_path / "first"
    shutil.copytree(trained.run.folder, parent, ignore=shutil.ignore_patterns("server"))
    verb, *options = args
    found = processes("killed", str(tmp_path), deaths, verb, str(parent), *options)
    assert found["codes"] == [0, *[-signal.SIGKILL] * len(deaths.split(",")), 0]
    document = orjson.dumps(found["killed"]).decode().replace("killed", "whole")
    assert orjson.loads(document) == found["whole"]
    assert not servers_below(tmp_path)
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")


def servers_below(folder: Path) -> list[str]:
    found = [each.info["cwd"] or "" for each in psutil.process_iter(["cwd"])]
    return [cwd for cwd in found if cwd.startswith(str(folder))]


def test_a_replay_of_a_bundle_ends_what_a_killed_one_left(trained: Config, tmp_path: Path) -> None:
    file, temporary = tmp_path / "step5.rmq", tmp_path / "temporary"
    temporary.mkdir()
    done = in_process("bundle", str(file), "--step", "5", "--run-dir", str(trained.run.folder))
    assert done.returncode == 0, done.stderr
    found = processes("bundle", str(temporary), str(file))
    assert found["codes"] == [-signal.SIGKILL, 0]
    assert found["differing"] == {}
    assert not servers_below(tmp_path)
    assert [path.name for path in temporary.iterdir()] == ["out"]


def contents(folder: Path) -> dict[str, Any]:
    """Return all that a run has, but times, and what its name is a part of."""
    names = ("archive/step-*", "checkpoints/*/state-*", "config.toml")
    found: dict[str, Any] = {
        str(path.relative_to(folder)): path.read_bytes().replace(b"killed", b"whole")
        for name in names
        for path in folder.glob(name)
        if path.is_file()
    }
    found["steps"] = {
        step.step: {n: str(v) for n, v in step.metrics.items() if not n.startswith(TIMES)}
        for step in read_steps(folder)
    }
    kept = CheckpointFolder(folder / "checkpoints")
    positions = [kept.read(step) for step in kept.steps()]
    found["positions"] = [
        position.model_dump(exclude={"run", "run_nonce", "terms", "proof"})
        for position in positions
    ]
    return found
