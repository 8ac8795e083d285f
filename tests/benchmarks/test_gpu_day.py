"""`make gpu-day` without a GPU: its report, its limits, and a rehearsal of the trainer's part."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest
import typer
from typer.testing import CliRunner, Result

from benchmarks.gpu_day.__main__ import main

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.chdir(ROOT)


def gpu_day(*arguments: str) -> Result:
    app = typer.Typer()
    app.command()(main)
    return CliRunner().invoke(app, arguments)


def test_nothing_is_measured_without_a_gpu(tmp_path: Path) -> None:
    done = gpu_day("--out", str(tmp_path / "day"))
    assert done.exit_code == 3
    assert "no CUDA GPU" in done.stderr
    assert not (tmp_path / "day").exists()


@pytest.mark.slow
def test_a_rehearsal_measures_train_steps_and_reports_them(tmp_path: Path) -> None:
    done = gpu_day("--rehearse", "train steps tiny", "--out", str(tmp_path))
    assert done.exit_code == 0, (tmp_path / "report.md").read_text(encoding="utf-8")
    (part,) = orjson.loads((tmp_path / "figures.json").read_bytes())
    trained = {f["section"]: f["value"] for f in part["figures"] if f["name"] == "trained"}
    assert {"train step, tiny, default", "train step, tiny, full logits"} <= trained.keys()
    assert all(value > 0 for value in trained.values())
    report = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "| train steps tiny | met |" in report
