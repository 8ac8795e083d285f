"""Reward by step and by wall time: a line per bound is the mean over seeds, its band the spread from least to most."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import numpy as np
import orjson

WINDOW = 5
"""Steps that a reward is averaged over."""


def plot(points: Path, file: Path) -> None:
    """`points`: JSON lines of `__main__`."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    trials: dict[tuple[bool, int], dict[int, list[dict[str, float]]]] = defaultdict(lambda: defaultdict(list))
    for line in points.read_bytes().splitlines():
        point = orjson.loads(line)
        trials[point["corrected"], point["bound"]][point["seed"]].append(point)
    figure, axes = plt.subplots(2, 2, figsize=(11, 7), sharey=True)
    for (corrected, bound), seeds in sorted(trials.items()):
        rewards = np.array([_smooth([p["reward"] for p in run]) for run in seeds.values()])
        walls = np.mean([[p["wall_s"] for p in run] for run in seeds.values()], axis=0)
        for place, x in enumerate((np.arange(1, rewards.shape[1] + 1), walls)):
            axis = axes[int(not corrected)][place]
            (line,) = axis.plot(x, rewards.mean(0), label=f"staleness up to {bound}")
            axis.fill_between(x, rewards.min(0), rewards.max(0), color=line.get_color(), alpha=0.15)
    for row, name in enumerate(("with correction", "without")):
        for place, x in enumerate(("train step", "seconds")):
            axes[row][place].set(title=name, xlabel=x)
            axes[row][place].grid(alpha=0.3)
        axes[row][0].set_ylabel(f"reward, mean of {WINDOW} steps")
        axes[row][0].legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    plt.close(figure)


def _smooth(values: list[float]) -> list[float]:
    return [float(np.mean(values[max(0, i + 1 - WINDOW) : i + 1])) for i in range(len(values))]
