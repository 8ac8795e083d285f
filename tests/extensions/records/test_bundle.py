from __future__ import annotations

import shutil
import zipfile
from pathlib import Path
from typing import Any

import orjson
import pytest

from buffer.redis.server.embedded import EmbeddedServer
from rolloutmq.config.config import Config
from tests.extensions.records.small_run import small_config, train_run
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


def test_a_run_without_an_archive_is_named(tmp_path: Path) -> None:
    (tmp_path / "runs" / "plain").mkdir(parents=True)
    (tmp_path / "runs" / "plain" / "run.json").touch()
    done = in_process("bundle", "b.rmq", "--step", "4", cwd=tmp_path)
    assert done.returncode == 2
    text = " ".join(done.stderr.split())
    assert "no step of the run in runs/plain is archived" in text
    assert "[retention] policy" in text


def test_a_file_with_two_steps_is_no_bundle(bundle: Path) -> None:
    rewrite(bundle, "archive/step-0000006.rmq", b"x")
    assert in_process("replay", str(bundle), "--json").returncode == 6


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


LOSSES: list[dict[str, dict[str, Any]]] = [
    {},
    {"learner": {"updates_per_batch": 3, "token_budget": 64}},
    {"learner": {"loss": {"kl_coef": 0.1, "entropy_coef": 0.01}}},
]


@pytest.mark.parametrize("changes", LOSSES, ids=["grpo", "updates", "kl"])
def test_a_bundle_without_its_model_has_the_numbers_that_do_not_need_it(
    tmp_path: Path, model_dir: Path, changes: dict[str, dict[str, Any]]
) -> None:
    run, model, file = tmp_path / "run", tmp_path / "model", tmp_path / "step5.rmq"
    shutil.copytree(model_dir, model)
    config = small_config(run, model, **changes)
    with EmbeddedServer(run / "server") as server:
        train_run(server.url, config, model)
    done = in_process("bundle", str(file), "--step", "5", "--run-dir", str(run), "--logprobs")
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(file) as bundle:
        assert not [name for name in bundle.namelist() if name.startswith(("model", "checkpoint"))]
        line = orjson.loads(bundle.read("steps.jsonl"))
    shutil.rmtree(model)
    shutil.rmtree(run)

    done = in_process("replay", str(file), "--json")
    assert done.returncode == 0, done.stdout
    assert orjson.loads(done.stdout)["compared"] > 40
    for name in ("optim/grad_norm", "loss/policy"):
        line["metrics"][name] *= 1 + 1e-4
        rewrite(file, "steps.jsonl", orjson.dumps(line) + b"\n")
        done = in_process("replay", str(file), "--json")
        found = orjson.loads(done.stdout)["differing"].get("5", [])
        assert [name for name, *_ in found] == ["loss/policy"] * (name == "loss/policy")
        assert done.returncode == DIFFERS * (name == "loss/policy")
    assert in_process("replay", str(file), "--name", "kept").returncode == 2


def test_a_step_whose_advantages_need_the_model_is_bundled_with_it(
    tmp_path: Path, model_dir: Path
) -> None:
    run, file = tmp_path / "run", tmp_path / "step1.rmq"
    config = small_config(run, model_dir, trainer={"advantages": "otb"}, plan={"steps": 1})
    with EmbeddedServer(run / "server") as server:
        train_run(server.url, config, model_dir)
    what = ("bundle", str(file), "--step", "1", "--run-dir", str(run))
    assert in_process(*what, "--logprobs").returncode == 2
    assert not file.exists()
    assert in_process(*what).returncode == 0


def test_what_is_no_bundle_and_what_is_no_step_have_a_way_out(
    trained: Config, tmp_path: Path
) -> None:
    folder = trained.run.folder
    done = in_process("replay", str(folder / "archive" / "step-0000003.rmq"))
    assert done.returncode == 2
    assert "`rolloutmq bundle` writes one" in done.stderr
    done = in_process("bundle", str(tmp_path / "x.rmq"), "--step", "9", "--run-dir", str(folder))
    assert "its steps are 1 to 5" in done.stderr
