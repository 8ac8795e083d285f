from __future__ import annotations

import shutil
import zipfile
from pathlib import Path

import orjson
import pytest

from rolloutmq.config.config import Config
from tests.rolloutmq.conftest import in_process

DIFFERS = 7


@pytest.fixture
def bundle(trained: Config, tmp_path: Path) -> Path:
    file = tmp_path / "step5.rmq"
    done = in_process("bundle", str(file), "--step", "5", "--run-dir", str(trained.run.folder))
    assert done.returncode == 0, done.stderr
    return file


def test_a_bundle_is_trained_again_where_nothing_else_of_the_run_is(
    bundle: Path, trained: Config, model_dir: Path
) -> None:
    hidden = [
        (path, path.with_name(f"{path.name}-hidden")) for path in (trained.run.folder, model_dir)
    ]
    for path, elsewhere in hidden:
        path.rename(elsewhere)
    try:
        done = in_process("replay", str(bundle), "--json")
    finally:
        for path, elsewhere in hidden:
            elsewhere.rename(path)
    assert done.returncode == 0, done.stderr
    assert orjson.loads(done.stdout)["differing"] == {}


def rewrite(bundle: Path, name: str, data: bytes) -> None:
    other = bundle.with_suffix(".other")
    with zipfile.ZipFile(bundle) as old, zipfile.ZipFile(other, "w") as new:
        for info in old.infolist():
            new.writestr(info.filename, data if info.filename == name else old.read(info))
        if name not in old.namelist():
            new.writestr(name, data)
    shutil.move(other, bundle)


def test_the_first_number_that_differs_is_named(bundle: Path) -> None:
    with zipfile.ZipFile(bundle) as old:
        line = orjson.loads(old.read("steps.jsonl"))
    line["metrics"]["loss/policy"] += 1e-12
    rewrite(bundle, "steps.jsonl", orjson.dumps(line) + b"\n")
    done = in_process("replay", str(bundle), "--json")
    assert done.returncode == DIFFERS
    assert [name for name, *_ in orjson.loads(done.stdout)["differing"]["5"]] == ["loss/policy"]


@pytest.mark.parametrize("name", ["../evil", "model/pytorch_model.bin", "archive/../../x.json"])
def test_a_bundle_with_another_file_is_refused(bundle: Path, name: str) -> None:
    rewrite(bundle, name, b"x")
    done = in_process("replay", str(bundle), "--json")
    assert done.returncode
    assert "no bundle" in done.stderr


def test_a_damaged_bundle_is_refused(bundle: Path) -> None:
    bundle.write_bytes(bundle.read_bytes()[:-100])
    done = in_process("replay", str(bundle), "--json")
    assert done.returncode == 6


def test_a_step_without_a_checkpoint_before_it_is_refused(trained: Config, tmp_path: Path) -> None:
    run = ("--run-dir", str(trained.run.folder))
    done = in_process("bundle", str(tmp_path / "b.rmq"), "--step", "4", *run)
    assert done.returncode
    assert "no checkpoint of step 3" in done.stderr


def test_the_run_of_a_bundle_is_kept_where_it_has_a_name(bundle: Path) -> None:
    done = in_process("replay", str(bundle), "--json")
    assert orjson.loads(done.stdout)["folder"] is None
    done = in_process("replay", str(bundle), "--json", "--name", "kept")
    kept = Path(orjson.loads(done.stdout)["folder"])
    assert (kept / "checkpoints").is_dir()
    assert in_process("replay", str(bundle), "--json", "--name", "kept").returncode


@pytest.mark.parametrize("name", ["", "..", "../out", "a/b", ".hidden", "step5.rmq"])
def test_a_name_that_is_none_is_refused(bundle: Path, name: str) -> None:
    done = in_process("replay", str(bundle), "--name", name)
    assert done.returncode == 2, done.stderr
    assert [path.name for path in bundle.parent.iterdir()] == [bundle.name]
