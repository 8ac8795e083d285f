"""The plot that a run ends with is a picture of its numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from buffer.monitoring.history import TrainedStep
from rolloutmq.launch.report import plot

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
