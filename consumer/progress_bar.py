"""A progress bar of training on a terminal; elsewhere, log lines report the progress."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from buffer.commands import screen


class ProgressBar:
    """Draw `done` of `steps` steps and the newest reward, as a `MetricWriter`.

    Usage:

        bar = ProgressBar(done=0, steps=100)
        bar.write(1, {"rewards/mean": 0.25})
        bar.close()
    """

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
        """Show that `step` is done."""
        reward = metrics.get("rewards/mean")
        text = "-" if reward is None else f"{reward:.3f}"
        self._bar.update(self._task, completed=step, reward=text)

    def close(self) -> None:
        """Stop drawing."""
        self._bar.stop()
