"""Plot reward by step and by time: a line is a mean over seeds, its band their range."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

WINDOW = 8
"""Steps that a reward is averaged over."""

PANELS = {
    "default loss, staleness at its bound": ("train step", "default", False),
    "weighted, not bounded (old_policy = current)": ("train step", "current", False),
    "not corrected": ("train step", "plain", False),
    "default loss, a core for sampling and one for training": (
        "seconds, from processor times",
        "default",
        False,
    ),
    "default loss, overlapping, as measured": ("seconds", "default", True),
}
"""Title: unit of the x axis, `loss` and `overlaps` of the trials. It is left out without trials."""

RATE = 1e-3
"""Learning rate of the trials that are drawn."""


def plot(lines: Path, file: Path) -> None:
    """`lines`: JSON lines of `__main__`, one per trial."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    found = [orjson.loads(line) for line in lines.read_bytes().splitlines()]
    trials = [trial for trial in found if trial["setting"]["rate"] == RATE]
    bounds = sorted({trial["setting"]["staleness"] for trial in trials})
    colors = dict(
        zip(bounds, plt.get_cmap("viridis_r")(np.linspace(0.1, 1, len(bounds))), strict=True)
    )
    there = {_kind(trial)[:2] for trial in trials}
    panels = {title: panel for title, panel in PANELS.items() if panel[1:] in there}
    figure, axes = plt.subplots(
        1,
        len(panels),
        figsize=(5.5 * len(panels), 5),
        sharey=True,
        layout="constrained",
        squeeze=False,
    )
    for axis, (title, (unit, *kind)) in zip(axes[0], panels.items(), strict=True):
        for bound, color in colors.items():
            seeds = [trial for trial in trials if _kind(trial) == (*kind, bound)]
            if seeds:
                _draw(axis, seeds, unit, color, f"staleness {bound} (n = {len(seeds)})")
        axis.set(title=title, xlabel=unit, ylim=(0, 1))
        axis.grid(alpha=0.3)
        axis.legend(loc="upper left", fontsize="small")
    axes[0, 0].set_ylabel(f"reward, mean of {WINDOW} steps")
    figure.savefig(file, dpi=100)
    plt.close(figure)


def _kind(trial: dict[str, Any]) -> tuple[str, bool, int]:
    setting = trial["setting"]
    return setting["loss"], setting["overlaps"], setting["staleness"]


def _draw(axis: Any, seeds: Sequence[dict[str, Any]], unit: str, color: Any, label: str) -> None:
    rewards = np.array([smooth(trial["reward"]) for trial in seeds])
    places = np.mean([_places(trial, unit) for trial in seeds], axis=0)
    axis.plot(places, rewards.mean(0), color=color, label=label)
    axis.fill_between(places, rewards.min(0), rewards.max(0), color=color, alpha=0.15, linewidth=0)


def _places(trial: dict[str, Any], unit: str) -> list[float]:
    """Of each step on the x axis."""
    match unit:
        case "train step":
            return list(trial["step"])
        case "seconds":
            return list(trial["wall_s"])
    return ends(trial["sample_s"], trial["train_s"], trial["setting"]["staleness"])


def ends(sample_s: float, train_s: Sequence[float], staleness: int) -> list[float]:
    """Return when each step ends if sampling and training have a core each, without other costs.

    A batch is sampled from the weights of `staleness + 1` steps before it: it waits for these and
    the batch before.
    """
    sampled, done = 0.0, [0.0]
    for step, seconds in enumerate(train_s, 1):
        sampled = max(sampled, done[max(0, step - staleness - 1)]) + sample_s
        done.append(max(sampled, done[-1]) + seconds)
    return done[1:]


def smooth(values: Sequence[float | None], window: int = WINDOW) -> NDArray[np.float64]:
    """Each value averaged with those before it; None is left out."""
    known = np.array(values, float)
    return np.array([np.nanmean(known[max(0, i + 1 - window) : i + 1]) for i in range(len(known))])
