"""FSDP2 with two gloo ranks: the numbers of one rank, exact resumes, and sharded weights."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest
import torch
from safetensors.torch import load_file

from consumer.models.model_folder import load_model
from tests.consumer.training.sharded_learner import CUT, STEPS

ROOT = Path(__file__).parents[3]


@pytest.mark.timeout(300)
def test_two_ranks_train_as_one_does_and_go_on_exactly_where_they_stopped(
    model_dir: Path, tmp_path: Path
) -> None:
    command = [
        sys.executable,
        "-m",
        "tests.consumer.training.sharded_learner",
        str(model_dir),
        str(tmp_path),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr.decode()[-4000:]

    def metrics_of(name: str, rank: int) -> list[dict[str, Any]]:
        steps: list[dict[str, Any]] = orjson.loads((tmp_path / f"{name}-{rank}.json").read_bytes())
        return steps

    one = metrics_of("one", 0)
    two = metrics_of("two", 0)
    assert len(one) == STEPS
    assert metrics_of("two", 1) == two  # metrics are of all ranks, on all ranks
    for alone, shared in zip(one, two, strict=True):
        assert alone.keys() == shared.keys()
        for name, value in alone.items():
            assert shared[name] == pytest.approx(value, rel=1e-3, abs=1e-5), name
    assert two[0]["optim/grad_norm"] > 0

    resumed = metrics_of("resumed", 0)
    assert resumed == two[CUT:]
    assert (
        whole(tmp_path / "weights" / "resumed").keys() == whole(tmp_path / "weights" / "two").keys()
    )
    for name, tensor in whole(tmp_path / "weights" / "two").items():
        assert torch.equal(tensor, whole(tmp_path / "weights" / "resumed")[name]), name

    # each rank wrote about half of it, and transformers reads what they wrote together
    sizes = [
        file.stat().st_size for file in sorted((tmp_path / "weights" / "two").glob("*.safetensors"))
    ]
    assert len(sizes) == 2
    assert max(sizes) < 0.7 * sum(sizes)
    loaded = dict(load_model(tmp_path / "weights" / "two").named_parameters())
    alone_weights = whole(tmp_path / "weights" / "one")
    for name, tensor in whole(tmp_path / "weights" / "two").items():
        assert torch.equal(loaded[name], tensor)
        torch.testing.assert_close(tensor, alone_weights[name], rtol=1e-3, atol=1e-4)


def whole(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for file in folder.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }
