"""Reports in a run of Weights & Biases."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orjson

from buffer.imports import import_extra
from buffer.redis.whole_file import replace_file
from consumer.config.trainer import TrainingConfig
from consumer.grpo.reporting.metric_writers import MetricWriter
from consumer.handle.sample_log import Sample
from rolloutmq.extensions.writers.sample_text import COLUMNS, is_due, of_task, sample_rows

TRAIN_STEP = "train_step"


class WandbWriter(MetricWriter):
    """Writes to one run of Weights & Biases, continued after a restart; the x axis is the step.

    Steps there cannot be replaced: those that an earlier trainer wrote are not written again.
    `wandb_run.json` in the run's folder has the id and the last written step.
    """

    package = "wandb"

    def __init__(self, config: TrainingConfig, first: int) -> None:
        package = import_extra("wandb", '[trainer] writers = ["wandb"]')
        folder = config.run.folder
        self._every = config.samples.report_every_steps
        self._table: Callable[..., Any] = package.Table
        self._file = folder / "wandb_run.json"
        self._record: dict[str, Any] = {"id": secrets.token_hex(4), "step": 0}
        if self._file.exists():
            self._record |= orjson.loads(self._file.read_bytes())
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
        replace_file(self._file, orjson.dumps(self._record))
