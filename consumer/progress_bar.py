"""How far training is, as a bar on a terminal; log lines say it elsewhere."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from buffer.commands import screen


class ProgressBar:
    """A `MetricWriter` that draws: `done` steps of `steps`, and the reward of the newest."""

    def __init__(self, done: int, steps: int, console: Console | None = None) -> None:
        self._bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("reward {task.fields[reward]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console or screen.console(stderr=True),
            refresh_per_second=2,
        )
        self._task = self._bar.add_task("train", total=steps, completed=done, reward="-")
        self._bar.start()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        reward = metrics.get("rewards/mean")
        self._bar.update(self._task, completed=step, reward="-" if reward is None else f"{reward:.3f}")

    def close(self) -> None:
        self._bar.stop()
