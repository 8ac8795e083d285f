from __future__ import annotations

import shutil
from pathlib import Path

import orjson
import pytest

from consumer.handle.checkpoint import CheckpointFolder
from consumer.handle.step_log import read_steps
from rolloutmq.config.config import Config
from rolloutmq.config.kept_config import differences
from tests.consumer.grpo.training_config import STEPS
from tests.rolloutmq.conftest import in_process

DIFFERS = 7


def replay(config: Config, *args: str, code: int = 0) -> dict[str, object]:
    done = in_process("replay", str(config.run.folder), "--json", *args)
    assert done.returncode == code, done.stderr
    return dict(orjson.loads(done.stdout)) if done.stdout else {"error": done.stderr}


@pytest.mark.parametrize("start", [0, 2, 3])
def test_a_replay_is_equal_bit_for_bit(trained: Config, start: int) -> None:
    """From the model, from a checkpoint, and from a step without one."""
    name = f"again-{start}"
    found = replay(trained, "--from", str(start), "--name", name)
    assert found["differing"] == {}
    assert found["differing_tensor"] == ""
    steps = read_steps(trained.run.folder.with_name(name))
    assert steps[-1].step == STEPS
    own = {step.step: step.gids for step in read_steps(trained.run.folder)}
    assert all(step.gids == own[step.step] for step in steps)


def test_with_another_setting_it_is_another_run(trained: Config) -> None:
    same = replay(trained, "--from", "2", "--to", "4", "--name", "same")
    wide = replay(
        trained, "--from", "2", "--to", "4", "--name", "wide", "--set", "learner.learning_rate=0.01"
    )
    assert wide["state"] != same["state"]
    own, other = (
        {step.step: step.metrics for step in read_steps(trained.run.folder.with_name(name))}
        for name in ("same", "wide")
    )
    assert own[3]["loss/policy"] == other[3]["loss/policy"]  # before the first update
    assert own[4]["loss/policy"] != other[4]["loss/policy"]
    assert own[3]["rewards/mean"] == other[3]["rewards/mean"]
    folders = {name: trained.run.folder.with_name(name) for name in ("same", "wide")}
    assert [name for name, _ in differences(folders)] == ["learner.learning_rate"]


def test_a_log_and_a_checkpoint_that_were_changed_are_named(
    trained: Config, tmp_path: Path
) -> None:
    parent = tmp_path / "changed"
    shutil.copytree(trained.run.folder, parent, ignore=shutil.ignore_patterns("server"))
    log = parent / "steps.jsonl"
    lines = [orjson.loads(line) for line in log.read_bytes().splitlines()]
    lines[3]["metrics"]["optim/grad_norm"] += 1e-12
    log.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
    state = (
        CheckpointFolder(parent / "checkpoints").path(STEPS) / "state-00000-of-00001.safetensors"
    )
    data = bytearray(state.read_bytes())
    data[-1] ^= 1
    state.write_bytes(data)
    done = in_process("replay", str(parent), "--json")
    assert done.returncode == DIFFERS
    found = orjson.loads(done.stdout)
    assert [*found["differing"]] == ["4"]
    assert [name for name, *_ in found["differing"]["4"]] == ["optim/grad_norm"]
    assert found["differing_tensor"]


def test_what_a_replay_cannot_do_is_said(trained: Config, tmp_path: Path) -> None:
    assert "trains rollouts that exist" in str(
        replay(trained, "--set", "tasks.math.prompt_repeat_k=2", code=2)
    )
    parent = tmp_path / "gap"
    shutil.copytree(trained.run.folder, parent, ignore=shutil.ignore_patterns("server"))
    (parent / "archive" / "step-0000003.rmq").unlink()
    done = in_process("replay", str(parent), "--json")
    assert done.returncode
    assert "lacks step 3" in done.stderr
    done = in_process("replay", str(parent), "--json", "--from", "4", "--name", "behind")
    assert done.returncode == 0, done.stderr
    done = in_process("replay", str(parent), "--json", "--to", "2", "--name", "before")
    assert done.returncode == 0, done.stderr
    done = in_process("replay", str(parent), "--json", "--to", "2", "--name", "before")
    assert "exists" in done.stderr
