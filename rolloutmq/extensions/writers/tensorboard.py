"""Reports in TensorBoard's event files."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from buffer.imports import import_extra
from consumer.config.trainer import TrainingConfig
from consumer.grpo.reporting.metric_writers import MetricWriter
from consumer.handle.sample_log import Sample
from rolloutmq.extensions.writers.sample_text import code_block, is_due, of_task, sample_text


class TensorBoardWriter(MetricWriter):
    """Writes event files into `<folder>/tensorboard`: scalars, and config and samples as text."""

    package = "tensorboardX"

    def __init__(self, config: TrainingConfig, first: int) -> None:
        package = import_extra("tensorboardX", '[trainer] writers = ["tensorboard"]')
        self._every = config.samples.report_every_steps
        self._events: Any = package.SummaryWriter(
            str(config.run.folder / "tensorboard"),
            # hide what a killed trainer wrote of later steps: those weights are lost
            purge_step=first,
            # file names have a resolution of one second: without a suffix, a restart within the
            # same second would overwrite a file
            filename_suffix=f".{time.time_ns()}",
        )
        settings = orjson.dumps(config.public(), option=orjson.OPT_INDENT_2).decode()
        self._events.add_text("config", code_block(settings), first)

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
