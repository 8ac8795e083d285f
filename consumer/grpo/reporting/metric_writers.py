"""Where the trainer reports, beside its files: TensorBoard, Weights & Biases, a progress bar."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import orjson
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
from buffer.imports import install_command
from consumer.config.training import TrainingConfig
from consumer.grpo.reporting.sample_log import Sample
from consumer.grpo.reporting.sample_text import (
    COLUMNS,
    code_block,
    indented_json,
    sample_rows,
    sample_text,
)

WriterName = Literal["tensorboard", "wandb"]


class MetricWriter:
    """A destination of reports, some of which come again after a restart."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of one step."""

    def write_evaluation(self, step: int, task: str, metrics: Mapping[str, float]) -> None:
        """Write the metrics of one held-out task, `eval/*`, for the weights after a step."""

    def write_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Write the samples of one step (`consumer.grpo.reporting.sample_log`)."""

    def close(self) -> None:
        """Write what is buffered, and release the destination."""


def open_writers(config: TrainingConfig, first: int) -> list[MetricWriter]:
    """Open [trainer] writers at step `first`.

    Raises ConfigError where a package is not installed.
    """
    makers: dict[str, Callable[[TrainingConfig, int], MetricWriter]] = {
        "tensorboard": TensorBoardWriter,
        "wandb": WandbWriter,
    }
    return [makers[name](config, first) for name in config.trainer.writers]


class TensorBoardWriter(MetricWriter):
    """Writes event files into `<folder>/tensorboard`: scalars, and config and samples as text."""

    def __init__(self, config: TrainingConfig, first: int) -> None:
        package = _load("tensorboardX", "tensorboard")
        self._every = config.samples.report_every_steps
        self._events: Any = package.SummaryWriter(
            str(config.run.folder / "tensorboard"),
            # hide what a killed trainer wrote of later steps: those weights are lost
            purge_step=first,
            # file names have a resolution of one second: without a suffix, a restart within the
            # same second would overwrite a file
            filename_suffix=f".{time.time_ns()}",
        )
        self._events.add_text("config", code_block(indented_json(config.public())), first)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._events.add_scalar(name, value, step)
        self._events.flush()

    def write_evaluation(self, step: int, task: str, metrics: Mapping[str, float]) -> None:
        self.write(step, of_task(task, metrics))

    def write_samples(self, step: int, samples: Sequence[Sample]) -> None:
        if is_due(step, self._every):
            for sample in samples:
                self._events.add_text(f"samples/{sample['why']}", sample_text(sample), step)
            self._events.flush()

    def close(self) -> None:
        self._events.close()


class WandbWriter(MetricWriter):
    """Writes to one run of Weights & Biases, continued after a restart; the x axis is the step.

    Steps there cannot be replaced: those that an earlier trainer wrote are not written again.
    `wandb_run.json` in the run's folder has the id and the last written step.
    """

    def __init__(self, config: TrainingConfig, first: int) -> None:
        package = _load("wandb", "wandb")
        folder = config.run.folder
        self._every = config.samples.report_every_steps
        self._table: Callable[..., Any] = package.Table
        self._file = folder / "wandb_run.json"
        self._record: dict[str, Any] = {"id": secrets.token_hex(4), "step": 0} | _read(self._file)
        self._run: Any = package.init(
            project=config.wandb.project,
            name=config.wandb.name or config.run.name,
            entity=config.wandb.entity,
            mode=config.wandb.mode,
            id=self._record["id"],
            dir=str(folder),
            resume="allow",
            config=config.public(),
            allow_val_change=True,
        )
        self._run.define_metric("*", step_metric=TRAIN_STEP)
        self._save()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        if step > self._record["step"]:
            self._run.log({**metrics, TRAIN_STEP: step})
            self._record["step"] = step
            self._save()

    def write_evaluation(self, step: int, task: str, metrics: Mapping[str, float]) -> None:
        self._run.log({**of_task(task, metrics), TRAIN_STEP: step})

    def write_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Write the samples as a table with a row for each rollout, at the interval."""
        if is_due(step, self._every):
            rows = [row for sample in samples for row in sample_rows(sample)]
            table = self._table(columns=list(COLUMNS), data=rows)
            self._run.log({"samples": table, TRAIN_STEP: step})

    def close(self) -> None:
        self._run.finish()

    def _save(self) -> None:
        """Replace the record, so that a trainer that dies here leaves the one before."""
        new = self._file.with_suffix(".new")
        new.write_bytes(orjson.dumps(self._record))
        new.replace(self._file)


TRAIN_STEP = "train_step"


def _read(file: Path) -> dict[str, Any]:
    record: dict[str, Any] = orjson.loads(file.read_bytes()) if file.exists() else {}
    return record


def is_due(step: int, every: int) -> bool:
    return step == 1 or step % every == 0


def of_task(task: str, metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics `eval/*` of a task as `eval/<task>/*`."""
    return {f"eval/{task}/{name.removeprefix('eval/')}": v for name, v in metrics.items()}


def _load(module: str, writer: WriterName) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"[trainer] writers: {module} is not installed",
            hint=f"{install_command(writer)}, or remove {writer!r} from [trainer] writers",
        ) from error


class ProgressBar(MetricWriter):
    def __init__(self, done: int, steps: int, console: Console | None = None) -> None:
        self._bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("reward {task.fields[reward]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console or Console(stderr=True),
            refresh_per_second=2,
        )
        self._task = self._bar.add_task("train", total=steps, completed=done, reward="-")
        self._bar.start()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        reward = metrics.get("rewards/mean")
        text = "-" if reward is None else f"{reward:.3f}"
        self._bar.update(self._task, completed=step, reward=text)

    def close(self) -> None:
        self._bar.stop()
