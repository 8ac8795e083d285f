from __future__ import annotations

import shutil
from pathlib import Path

import orjson
import pytest

from rolloutmq.config.config import Config
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
