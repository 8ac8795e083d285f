"""Destinations of a step's metrics beside `steps.jsonl`.

TensorBoard, Weights & Biases, and a progress bar on a terminal; without a terminal, log lines
report the progress.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from buffer.errors import ConfigError
from buffer.monitoring.console import console as open_console

WriterName = Literal["tensorboard", "wandb"]


class MetricWriter(Protocol):
    """Write the metrics of one step after the other; after a restart, some steps again.

    Usage:

        for writer in open_writers(("tensorboard",), folder, run.name, first=1):
            writer.write(step, metrics)
    """

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of one step."""

    def close(self) -> None:
        """Write what is buffered, and release the destination."""


def open_writers(
    names: Sequence[WriterName], folder: Path, run: str, first: int
) -> list[MetricWriter]:
    """Open the named writers; `first`: the step that is written next.

    Raises ConfigError where a writer's package is not installed.
    """
    makers: dict[WriterName, Callable[[Path, str, int], MetricWriter]] = {
        "tensorboard": TensorBoardWriter,
        "wandb": WandbWriter,
    }
    return [makers[name](folder, run, first) for name in names]


class TensorBoardWriter:
    """Write event files into `<folder>/tensorboard`.

    Usage:

        writer = TensorBoardWriter(folder, run.name, first=1)    # tensorboard --logdir <folder>
    """

    def __init__(self, folder: Path, run: str, first: int) -> None:
        package = _load("tensorboardX", "tensorboard")
        self._events: Any = package.SummaryWriter(
            str(folder / "tensorboard"),
            # hide what a killed trainer wrote of later steps: those weights are lost
            purge_step=first,
            # file names have a resolution of one second: without a suffix, a restart within the
            # same second would overwrite a file
            filename_suffix=f".{time.time_ns()}",
        )

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of one step."""
        for name, value in metrics.items():
            self._events.add_scalar(name, value, step)
        self._events.flush()

    def close(self) -> None:
        """Close the event file."""
        self._events.close()


class WandbWriter:
    """Write to one run of Weights & Biases for each run, continued after a restart.

    The x axis is the train step, not the time.

        writer = WandbWriter(folder, run.name, first=1)
    """

    def __init__(self, folder: Path, run: str, first: int) -> None:
        package = _load("wandb", "wandb")
        self._run: Any = package.init(
            project="rolloutmq", name=run, id=run, dir=str(folder), resume="allow"
        )
        self._run.define_metric("*", step_metric="train_step")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of one step."""
        self._run.log({**metrics, "train_step": step})

    def close(self) -> None:
        """Finish the run at Weights & Biases."""
        self._run.finish()


def _load(module: str, writer: WriterName) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"[trainer] writers: {module} is not installed",
            hint=f"pip install {module}, or remove {writer!r} from [trainer] writers",
        ) from error


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
            console=console or open_console(stderr=True),
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
