from __future__ import annotations

import shutil
import threading
import time
from pathlib import Path

import orjson
import pytest

from buffer.errors import ConfigError, RoleHeld
from rolloutmq.config.config import Config
from rolloutmq.extensions.records.folders import new_run
from rolloutmq.run_owner import Stage, own, read_record
from tests.rolloutmq.conftest import in_process

JUDGE = "tests.extensions.records.other_judge:reversed_score"


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../out", "a/b", "/out", ".hidden", "first", "a b"]
)
@pytest.mark.parametrize(
    "call",
    [
        ("replay",),
        ("fork", "--at", "2"),
        ("rescore", "--from", "2", "--task", "math", "--judge", JUDGE),
    ],
    ids=lambda call: call[0],
)
def test_a_name_that_is_none_is_refused(trained: Config, call: tuple[str, ...], name: str) -> None:
    folder = trained.run.folder
    before = {*folder.parent.iterdir(), *folder.iterdir()}
    done = in_process(call[0], str(folder), *call[1:], "--name", name)
    assert done.returncode == 2, done.stderr
    assert "--name" in done.stderr
    assert {*folder.parent.iterdir(), *folder.iterdir()} == before


@pytest.mark.parametrize("where", [".", "../first", "checkpoints/.."])
def test_a_parent_may_be_the_current_folder(trained: Config, tmp_path: Path, where: str) -> None:
    parent = tmp_path / "first"
    shutil.copytree(trained.run.folder, parent, ignore=shutil.ignore_patterns("server"))
    done = in_process("replay", where, "--from", "4", "--json", cwd=parent)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "first-replay" / "checkpoints").is_dir()
    assert orjson.loads(done.stdout)["run"] == "first-replay"


@pytest.mark.parametrize(
    "call",
    [
        ("replay", "--from", "4", "--set", "learner.loss.clip_hgh=0.1"),
        ("replay", "--from", "9"),
        ("fork", "--at", "3"),
        ("fork", "--at", "2", "--set", "plan.stps=9"),
        ("rescore", "--from", "2", "--task", "code", "--judge", JUDGE),
        ("rescore", "--from", "2", "--task", "math", "--judge", "nowhere:score"),
    ],
    ids=" ".join,
)
def test_a_mistake_in_a_command_leaves_no_folder(trained: Config, call: tuple[str, ...]) -> None:
    folder = trained.run.folder
    done = in_process(call[0], str(folder), *call[1:], "--name", "mistaken")
    assert done.returncode == 2, done.stderr
    assert "hint:" in done.stderr or "did you mean" in done.stderr
    assert not folder.with_name("mistaken").exists()


def test_of_two_commands_at_once_the_later_one_leaves_the_run_of_the_first(tmp_path: Path) -> None:
    folder, began = tmp_path / "run", threading.Event()

    def first() -> None:
        with own(folder, "run", ["fork"], 2):
            (folder / "checkpoints").mkdir()
            began.set()
            time.sleep(0.3)  # the other one waits for the lock meanwhile

    one = threading.Thread(target=first)
    one.start()
    began.wait()
    with pytest.raises((ConfigError, RoleHeld)), new_run(folder, "fork", 2):
        pass
    one.join()
    assert (folder / "checkpoints").exists()
    record = read_record(folder)
    assert record
    assert record.stage is Stage.FINISHED
