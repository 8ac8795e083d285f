"""Where the metrics of a step go beside `steps.jsonl`: TensorBoard, and Weights & Biases where that is installed."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, Protocol

from buffer.errors import ConfigError

WriterName = Literal["tensorboard", "wandb"]


class MetricWriter(Protocol):
    """Writes one step after the other; after a restart, some of them again."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None: ...
    def close(self) -> None: ...


def open_writers(names: Sequence[WriterName], folder: Path, run: str, first: int) -> list[MetricWriter]:
    """The writers of these names; `first`: the step that is written next. ConfigError for one that is not installed."""
    makers: dict[WriterName, Callable[[Path, str, int], MetricWriter]]
    makers = {"tensorboard": TensorBoardWriter, "wandb": WandbWriter}
    return [makers[name](folder, run, first) for name in names]


class TensorBoardWriter:
    """Event files in `<folder>/tensorboard`; `tensorboard --logdir` shows them."""

    def __init__(self, folder: Path, run: str, first: int) -> None:
        package = _load("tensorboardX", "tensorboard")
        # purge: what a trainer that was killed wrote of later steps is not of the weights that exist
        # suffix: files are named by the second, and one of the same second would be overwritten
        suffix = f".{time.time_ns()}"
        self._events: Any = package.SummaryWriter(
            str(folder / "tensorboard"), purge_step=first, filename_suffix=suffix
        )

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._events.add_scalar(name, value, step)
        self._events.flush()

    def close(self) -> None:
        self._events.close()


class WandbWriter:
    """One run of Weights & Biases per run of ours, gone on with after a restart; by the train step, not by time."""

    def __init__(self, folder: Path, run: str, first: int) -> None:
        package = _load("wandb", "wandb")
        self._run: Any = package.init(project="rolloutmq", name=run, id=run, dir=str(folder), resume="allow")
        self._run.define_metric("*", step_metric="train_step")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({**metrics, "train_step": step})

    def close(self) -> None:
        self._run.finish()


def _load(module: str, extra: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"[trainer] writers: {module} is not installed", hint=f"pip install {module}, or remove {extra!r} from them"
        ) from error
