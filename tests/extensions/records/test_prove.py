from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import orjson
import pytest

from consumer.handle.checkpoint import CheckpointFolder
from rolloutmq.config.config import Config
from rolloutmq.launch.terms import keep_terms
from tests.consumer.grpo.training_config import GROUPS, STEPS
from tests.rolloutmq.conftest import in_process


@pytest.fixture
def copied(trained: Config, tmp_path: Path) -> Path:
    folder = tmp_path / "first"
    shutil.copytree(trained.run.folder, folder, ignore=shutil.ignore_patterns("server", "weights"))
    return folder


def prove(folder: Path, *args: str, step: int = STEPS) -> tuple[int, dict[str, Any]]:
    checkpoint = CheckpointFolder(folder / "checkpoints").path(step)
    done = in_process("prove", str(checkpoint), "--json", *args)
    assert done.stdout, done.stderr
    return done.returncode, orjson.loads(done.stdout)


def test_every_checkpoint_of_a_run_is_proven(copied: Path) -> None:
    for step in (2, 4, STEPS):
        code, found = prove(copied, step=step)
        assert (code, found["whole"]) == (0, True)
        assert found["groups"] == {"math": step * GROUPS}
        assert found["judges"] == ["exact_match"]


def test_a_replay_has_the_proof_of_the_run(trained: Config, copied: Path) -> None:
    done = in_process("replay", str(trained.run.folder), "--json", "--name", "proven")
    assert done.returncode == 0, done.stderr
    position = CheckpointFolder(trained.run.folder.with_name("proven") / "checkpoints").read(STEPS)
    assert position.proof == prove(copied)[1]["proof"]


def test_the_steps_that_touched_a_source_are_named(copied: Path) -> None:
    assert prove(copied, "--without-source", "math")[0] == 6
    code, found = prove(copied, "--without-source", "web")
    assert (code, found["steps_with_source"]) == (0, [])


def test_any_flipped_bit_of_a_record_is_named(copied: Path) -> None:
    draw = random.Random(3)
    checkpoint = CheckpointFolder(copied / "checkpoints").path(STEPS)
    files = [path for path in checkpoint.iterdir() if path.is_file()]
    files += [*(copied / "archive").glob("[!.]*"), *(copied / "terms").iterdir()]
    assert len(files) > STEPS + 3
    for file in files:
        whole = file.read_bytes()
        flipped = bytearray(whole)
        flipped[draw.randrange(len(whole))] ^= 1 << draw.randrange(8)
        file.write_bytes(flipped)
        code, found = prove(copied)
        assert (code, found["whole"]) == (6, False), file
        said = " ".join(check["what"] for check in found["checks"] if check["level"] == "fault")
        place = f"{file.parent.name}/{file.name}" if file.suffix == ".json" else file.name
        assert place.removesuffix(".sha256") in said
        file.write_bytes(whole)


def test_steps_in_another_order_are_found(copied: Path) -> None:
    archive = copied / "archive"
    position = CheckpointFolder(copied / "checkpoints").read(STEPS)
    one, two = (archive / f"step-000000{step}.rmq" for step in (1, 2))
    data = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(data)
    code, found = prove(copied)
    assert code == 6
    assert position.proof == found["proof"]


def test_a_missing_file_is_a_note(copied: Path) -> None:
    (copied / "archive" / "step-0000003.rmq").unlink()
    code, found = prove(copied)
    assert (code, found["whole"]) == (0, True)
    assert "note" in {check["level"] for check in found["checks"]}


def test_first_weights_in_the_folder_of_the_run_are_compared(copied: Path, model_dir: Path) -> None:
    shutil.copytree(model_dir, copied / "model")
    checkpoints = CheckpointFolder(copied / "checkpoints")
    position = checkpoints.read(STEPS)
    terms = orjson.loads((copied / "terms" / f"{position.terms_of(1)}.json").read_bytes())
    terms["config"]["policy"]["model"] = None  # as `rolloutmq run` warms a model up
    position.set_terms(keep_terms(copied, terms))
    checkpoints.complete(position, checkpoints.begin(STEPS))

    def said() -> str:
        return " ".join(check["what"] for check in prove(copied)[1]["checks"])

    assert "the first weights are unaltered" in said()
    file = next((copied / "model").glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1])
    assert f"the first weights were altered: {copied / 'model'}" in said()


@pytest.mark.parametrize("name", [".", "checkpoints", "checkpoints/step-000003"])
def test_what_is_no_checkpoint_is_refused(copied: Path, name: str) -> None:
    done = in_process("prove", str(copied / name))
    assert done.returncode == 2
    assert "is no folder of a checkpoint" in done.stderr
