"""The plot that a run ends with is a picture of its numbers."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from consumer.grpo.reporting.step_log import Evaluations, TrainedStep
from rolloutmq.launch.report import accuracy_table, activation, plot

WHITE = 1.0


def steps(rewards: list[float]) -> list[TrainedStep]:
    return [
        TrainedStep(i, "l1", (), {"rewards/mean": r, "staleness/mean": i % 2})
        for i, r in enumerate(rewards, 1)
    ]


def picture(
    file: Path, history: list[TrainedStep], evaluations: dict[tuple[str, int], dict[str, float]]
) -> Any:
    from matplotlib import image

    plot(history, evaluations, file)
    assert file.read_bytes().startswith(b"\x89PNG")
    return image.imread(file)[..., :3]


def test_plot_shows_different_numbers_differently(tmp_path: Path) -> None:
    evaluations = {("quiz", 0): {"eval/accuracy": 0.2}, ("quiz", 30): {"eval/accuracy": 0.8}}
    rising = picture(tmp_path / "a.png", steps([i / 30 for i in range(30)]), evaluations)
    flat = picture(tmp_path / "b.png", steps([0.5] * 30), {})
    assert rising.shape == flat.shape
    assert rising.shape[0] > 400
    assert (rising.min(axis=-1) < WHITE).mean() > 0.01
    assert np.abs(rising - flat).max() > 0.5


@pytest.mark.parametrize("rewards", [[], [0.5], [float("nan"), 0.5]])
def test_plot_is_made_of_a_short_run_too(tmp_path: Path, rewards: list[float]) -> None:
    assert picture(tmp_path / "a.png", steps(rewards), {}).min() < WHITE


def _text(evaluations: Evaluations) -> str:
    screen = Console(file=io.StringIO(), width=100)
    screen.print(accuracy_table(evaluations))
    return screen.file.getvalue()  # type: ignore[attr-defined, no-any-return]


@pytest.mark.parametrize(
    ("steps", "row"),
    [
        ([0, 60, 308], ["quiz", "0.250", "0.750", "308", "+0.500", "8"]),  # `set steps=308` of 80
        ([80], ["quiz", "-", "0.750", "80", "-", "8"]),  # a loop that evaluates only at the end
        ([0], ["quiz", "0.250", "0.250", "0", "+0.000", "8"]),
    ],
)
def test_accuracy_is_that_of_the_newest_step_that_was_evaluated(
    steps: list[int], row: list[str]
) -> None:
    evaluations = {
        ("quiz", step): {"eval/accuracy": 0.75 if step else 0.25, "eval/rollouts": 8.0}
        for step in steps
    }
    assert _text(evaluations).splitlines()[-1].replace("│", " ").split() == row


@pytest.mark.parametrize("is_active", [True, False])
def test_commands_to_inspect_a_run_start_with_what_makes_them_commands(
    is_active: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent) if is_active else "/nowhere")
    assert activation() == ("" if is_active else f"source {sys.prefix}/bin/activate")
